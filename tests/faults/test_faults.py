"""Any call may fail once: memory, files, threads. Nothing is lost, and a sentence says what it was.

`KTK_FAULTS` asks for more than a few of each kind.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import checkpoints as made
import pytest

HERE = Path(__file__).parent
MOST = int(os.environ.get("KTK_FAULTS", "6"))
FAULTS = {
    "convert": ("new", "map", "open", "read", "write", "sync", "rename", "thread"),
    "load": ("new", "map", "open", "read", "thread"),
    "call": ("new", "map", "thread"),
}
# What goes on without the call: a thread that prefetches, say.
NEEDED = ("open", "read", "write", "sync", "rename")


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shim") / "shim.so"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")
    options = ["-O1", "-Wall", "-shared", "-fPIC", "-std=c++17", "-pthread", "-o", str(path)]
    subprocess.run([*compiler, *options, str(HERE / "shim.cc"), "-ldl"], check=True)
    return path


@pytest.mark.parametrize(
    ("doing", "kind"), [(doing, kind) for doing, kinds in FAULTS.items() for kind in kinds]
)
def test_a_call_that_fails_loses_nothing(tmp_path: Path, shim: Path, doing: str, kind: str) -> None:
    # Of what is loaded, workers read matrices of 128 KiB.
    sizes = (2, 256, 320) if doing == "load" else (2, 64, 96)
    source = made.write(tmp_path / "source", layers=(0, 1), sizes=sizes)
    done = subprocess.run(
        [sys.executable, HERE / "fail_each.py", doing, kind, source, tmp_path, str(MOST)],
        env={**os.environ, "LD_PRELOAD": str(shim), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    *attempts, last = map(json.loads, done.stdout.splitlines())
    assert last["all"] > 0
    assert len(attempts) == min(MOST, last["all"])
    # A few of the smallest allocations are nanobind's own, and it ends the process.
    aborted = [attempt for attempt in attempts if attempt.get("aborted")]
    assert len(aborted) <= 1 + len(attempts) // 10, aborted
    for attempt in attempts:
        if attempt in aborted:
            continue
        sentence = attempt["sentence"]
        assert "\n" not in sentence, attempt
        if sentence:
            kind_of_error, _, text = sentence.partition(": ")
            assert len(text) > 10, f"{attempt}: {kind_of_error} says nothing"
        elif kind in NEEDED:
            raise AssertionError(f"{attempt}: the call failed, and nobody said so")
