"""A process ends normally while daemon threads are inside ktk."""

from __future__ import annotations

import subprocess
import sys
import sysconfig

import pytest

# Daemon threads that do `sys.modules["x"] = None` hang CPython 3.13t as it ends, in one run of
# eight: a thread that is stopped for good may have been handed the dictionary's lock.
pytestmark = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="free-threaded CPython may hang as it ends, without ktk, too",
)

CODE = """
import threading, time
import numpy as np, ktk
from ktk import _core

moe = ktk.load_backend("BF16").moe(
    num_experts=2, num_experts_per_tok=2, hidden_size=256, intermediate_size=256,
    pool=ktk.WorkerPool(threads=2))
rng = np.random.default_rng(0)
expert = [rng.standard_normal((256, 256), np.float32)] * 3
moe.load(*[[e] * 2 for e in expert])
tokens = 256
inputs = (np.ones((tokens, 256), np.float32), np.tile(np.arange(2), (tokens, 1)),
          np.ones((tokens, 2), np.float32))

def call():
    moe(*inputs)

def submit():
    moe.submit(*inputs).wait()

def drop():
    moe.submit(*inputs)

def load():
    moe.load_expert(0, *expert)

def unpack():
    moe.unpack_expert(0)

def reset():
    moe.reset_counts()

def shards():
    moe.shards

def stream():
    out = np.empty_like(inputs[0])
    made = _core.AsyncCall(moe._core, *inputs, None, out, _core.Latch(), name="layer")
    made.start()
    made.wait()

def repeat():
    while True:
        {action}()

def call_on():  # the others wait for its turn on the pool
    while True:
        call()

threading.Thread(target=call_on, daemon=True).start()
for _ in range(3):
    threading.Thread(target=repeat, daemon=True).start()
time.sleep(0.3)
print("the end", flush=True)
"""

OTHERS = ("submit", "drop", "load", "unpack", "stream", "reset", "shards")


@pytest.mark.parametrize(
    "action",
    ["call", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_a_process_ends(action: str) -> None:
    code = CODE.replace("{action}", action)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the end\n", "")  # -6 is SIGABRT
