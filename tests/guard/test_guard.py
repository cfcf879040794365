"""Guard mode (KTK_GUARD=1): planted faults end or show in it, and random layers find none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ktk

HERE = Path(__file__).parent
TESTS = HERE.parent
TOOL = TESTS.parent / "tools" / "guard"

OVERRUNS = ("weight_behind", "act_behind", "scratch_behind", "dst_behind")
UNWRITTEN = ("column_unwritten", "dst_unwritten", "weight_unwritten")

# Two experts, and tokens that take turns with them: the rows of an expert are no neighbours. Prints
# for each backend, and each of two calls, whether there is a NaN in each token.
CALLS = """
import json, sys
import numpy as np
import ktk
from ktk.testing.plugin import load

rng = np.random.default_rng(1)
gate, up = (rng.standard_normal((2, 24, 40)).astype(np.float32) for _ in range(2))
down = rng.standard_normal((2, 40, 24)).astype(np.float32)
x, ids = rng.standard_normal((4, 40)).astype(np.float32), np.array([[0], [1], [0], [1]])
found = {}
for name in sys.argv[1:]:
    moe = load(f"mutants:{name}").moe(
        num_experts=2, num_experts_per_tok=1, hidden_size=40, intermediate_size=24,
        pool=ktk.WorkerPool(1, pin=False),
    )
    moe.load(gate, up, down)
    results = [moe(x, ids, np.ones((4, 1), np.float32)) for _ in range(2)]
    found[name] = [np.isnan(one).any(axis=1).tolist() for one in results]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backends of planted.c."""
    made = tmp_path_factory.mktemp("planted") / "libplanted.so"
    flags = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-override-init", "-fPIC"]
    include = ["-isystem", ktk.get_include()]
    source = HERE / "planted.c"
    subprocess.run(["cc", *flags, *include, "-shared", source, "-o", made], check=True)
    return made


def call(library: Path, names: Sequence[str], guard: str) -> subprocess.CompletedProcess[str]:
    """Compute a layer with each of some backends, in a process of its own."""
    more = {"KTK_MUTANTS": str(library), "KTK_GUARD": guard}
    return subprocess.run(
        [sys.executable, "-c", CALLS, *names],
        env=os.environ | more | {"PYTHONPATH": str(TESTS / "mutants")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_without_guard_mode_nothing_shows(library: Path) -> None:
    done = call(library, OVERRUNS + UNWRITTEN, "0")
    assert done.returncode == 0, done.stderr
    assert "true" not in done.stdout


@pytest.mark.parametrize("name", OVERRUNS)
def test_an_overrun_ends_at_the_page(library: Path, name: str) -> None:
    done = call(library, [name], "1")
    assert done.returncode == -signal.SIGSEGV, done.stdout + done.stderr


def test_what_nobody_wrote_is_nan(library: Path) -> None:
    done = call(library, ("sound", *UNWRITTEN), "1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # In each call, not in the first one only, whose memory is new.
    everywhere, nowhere = [[True] * 4] * 2, [[False] * 4] * 2
    assert found == {"sound": nowhere} | dict.fromkeys(UNWRITTEN, everywhere)


def random_layers(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL, *options], capture_output=True, text=True, timeout=300, check=False
    )


def test_random_layers_are_right() -> None:
    done = random_layers("--layers", "150", "--seed", "21", "--seconds", "40")
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in ("compute", "train", "dense"):
        assert f"> {kind}\n" in done.stdout


def test_random_layers_notice_and_survive_faults(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KTK_MUTANTS", str(library))
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "mutants"))
    backends = [f"--backend=mutants:{name}" for name in ("weight_behind", "dst_unwritten")]
    done = random_layers("--layers", "8", *backends)
    assert done.returncode == 1, done.stdout + done.stderr
    assert ": SIGSEGV" in done.stderr
    assert ": AssertionError: " in done.stderr
