"""`ktk doctor` on the machine that runs the tests: faults that can be brought about there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ktk.cli.health.machine import Machine
from ktk.cli.health.processors import threads


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KTK_THREADS", "KTK_GUARD", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def doctor(prelude: str = "", **environment: str) -> dict[str, Any]:
    """Run the command in a process of its own, after some lines of Python."""
    code = f"import os\n{prelude}\nfrom ktk.cli import app\napp(['doctor', '--json'])"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


def warnings(document: dict[str, Any], subject: str) -> list[dict[str, str]]:
    named = [one for one in document["findings"] if one["subject"] == subject]
    return [one for one in named if one["state"] == "warning"]


def test_settings_that_mean_nothing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"KTK_DEVICE": "foo", "KTK_HEAD": "NOPE", "KTK_BACKEND": "BF16"}.items():
        monkeypatch.setenv(name, value)
    found = [one for one in threads(Machine()) if one.subject == "settings"]
    assert {one.state for one in found} == {"problem"}
    said = sorted(one.text for one in found)
    assert len(said) == 2, said
    assert "KTK_DEVICE must be cpu, cuda" in said[0]
    assert "no backend 'NOPE'" in said[1]


def test_a_mask_of_this_process_is_named() -> None:
    cores = [core for node in Machine().topology["nodes"] for core in node["cores"]]
    if len(cores) < 2:
        pytest.skip("one core: no mask leaves another out")
    found = doctor(f"os.sched_setaffinity(0, [{cores[0]}])")
    [warning] = warnings(found, "CPU mask")
    assert warning["evidence"].endswith(f"status: {cores[0]}")
    assert "CPU mask" in found["in_the_way"]


@pytest.mark.slow
def test_processes_that_use_all_cpus_are_named() -> None:
    """Two for each CPU: whatever else runs, less is left for ktk."""
    cpus = sorted(os.sched_getaffinity(0))
    bind = "import os, sys\nos.sched_setaffinity(0, [int(sys.argv[1])])\nprint(flush=True)\n"
    loop = bind + "while True: pass"
    burners = [
        subprocess.Popen([sys.executable, "-c", loop, str(cpu)], stdout=subprocess.PIPE)
        for cpu in cpus
        for _ in range(2)
    ]
    try:
        for burner in burners:
            assert burner.stdout is not None
            burner.stdout.readline()
        found = doctor()
    finally:
        for burner in burners:
            burner.kill()
            burner.communicate()
    named = [one for one in warnings(found, "oversubscription") if "/proc/stat" in one["evidence"]]
    assert len(named) == 1
    assert "other processes use" in named[0]["text"]


def test_too_many_workers_and_guard_mode_are_named() -> None:
    found = doctor(KTK_THREADS="100000", KTK_GUARD="1")
    evidence = [one["evidence"] for one in warnings(found, "oversubscription")]
    assert "KTK_THREADS=100000" in evidence
    assert warnings(found, "KTK_GUARD")[0]["evidence"] == "KTK_GUARD=1"
