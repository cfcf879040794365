"""Guard mode (KTK_GUARD=1): planted faults end or show in it, and random layers find none."""

from __future__ import annotations

import json
import os
import runpy
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


@pytest.mark.parametrize("option", ["--layers", "--seed", "--first"])
def test_numbers_below_zero_are_refused(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KTK_GUARD", os.environ.get("KTK_GUARD", "0"))  # the tool sets it
    monkeypatch.setattr(sys, "argv", ["guard", option, "-1"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(TOOL), run_name="__main__")
    assert f"argument {option}: -1 is less than 0" in capsys.readouterr().err


# The tool, whose every second layer does what no layer should.
PLANTED = """
import os, runpy, signal, sys, time

tool = runpy.run_path(sys.argv[1])
names = tool["main"].__globals__
def hang(subject, chance):
    time.sleep(1000)

def killed(subject, chance):
    os.kill(os.getpid(), signal.SIGKILL)

def right(subject, chance):
    pass

def layers(numbers, seed, choices, report):
    if how == "none":
        sys.exit(7)
    for number in numbers:
        names["compute"] = names["train"] = names["dense"] = faulty if number % 2 else right
        work(iter([number]), seed, choices, report)

how = sys.argv[2]
if how == "hang":
    names["PATIENCE"] = 2
faulty, work = {"hang": hang, "killed": killed, "none": right}[how], tool["work"]
names["work"] = layers
sys.argv[1:] = ["--layers", "4", "--backend", "BF16"]
sys.exit(tool["main"]())
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("hang", ["layer 1 ", "hang: no end after 2 s", "layer 3 ", "hang: no end after 2 s"]),
        ("killed", ["layer 1 ", "killed: SIGKILL", "layer 3 ", "killed: SIGKILL"]),
        ("none", ["a child began no layer: status 7"]),
    ],
)
def test_a_layer_without_end_and_a_child_that_others_end_are_faults(
    how: str, said: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, TOOL, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    faults = [line for line in done.stderr.splitlines() if line.startswith("seed 1, ")]
    assert len(faults) == (len(said) + 1) // 2
    rest = "\n".join(faults)
    for text in said:
        assert text in rest, done.stderr
        rest = rest.partition(text)[2]
    assert done.stdout.splitlines()[-1].endswith(f" s, {len(faults)} faults")
