"""Arrays that other threads write to during a call: any result may come, and nothing is harmed."""

from __future__ import annotations

import subprocess
import sys

import pytest

# With ids that were read twice, the memory of rows was overrun within a second or two.
CODE = """
import threading, time
import numpy as np, ktk

moe = ktk.load_backend("BF16").moe(
    num_experts=64, num_experts_per_tok=8, hidden_size=32, intermediate_size=32,
    pool=ktk.WorkerPool(threads=1))
rng = np.random.default_rng(0)
moe.load(*rng.standard_normal((3, 64, 32, 32), np.float32))
hidden = rng.standard_normal((4000, 32), np.float32)
weights, ids = rng.random((4000, 8), np.float32), np.zeros((4000, 8), np.int64)
end = time.monotonic() + 6

def change():
    while time.monotonic() < end:
        ids[:] = 63
        ids[:] = -1

thread = threading.Thread(target=change)
thread.start()
while thread.is_alive():
    moe(hidden, ids, weights)
print("well")
"""


@pytest.mark.slow
def test_ids_that_change_during_a_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
