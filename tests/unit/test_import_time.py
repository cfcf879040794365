"""`import ktk` is quick, and does nothing that its user did not ask for."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

_TIMED = """
import time
import torch
started = time.perf_counter()
import ktk
print(time.perf_counter() - started)
"""

_INSPECTED = """
import json, os, sys
import torch
before = set(sys.modules)
import ktk
print(json.dumps({
    "modules": sorted(set(sys.modules) - before),
    "threads": len(os.listdir("/proc/self/task")),
}))
"""

# What only a command, a checkpoint or a test needs.
_LAZY = (
    "gguf",
    "hypothesis",
    "matplotlib",
    "pytest",
    "rich",
    "safetensors",
    "transformers",
    "typer",
)


def run(program: str) -> str:
    """Run a program in a fresh interpreter, away from the source tree."""
    command = [sys.executable, "-P", "-c", program]
    if sys.version_info < (3, 11):
        command.remove("-P")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_adds_less_than_a_third_of_a_second_to_torch() -> None:
    seconds = [float(run(_TIMED)) for _ in range(5)]
    assert statistics.median(seconds) < 0.3, seconds


def test_import_loads_no_backend_and_no_optional_package() -> None:
    modules = json.loads(run(_INSPECTED))["modules"]
    assert "ktk._core" in modules
    lazy = [name for name in modules if name.partition(".")[0] in _LAZY]
    assert not lazy
    loaded = [name for name in modules if name.startswith("ktk.backends.")]
    assert not loaded


def test_import_starts_no_threads() -> None:
    with_ktk = json.loads(run(_INSPECTED))["threads"]
    without = json.loads(run(_INSPECTED.replace("import ktk\n", "")))["threads"]
    assert with_ktk == without
