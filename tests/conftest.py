"""What holds for all tests, and a driver of GPUs that is none: tests/ktmoe/stub_driver.c."""

import os
import shlex
import signal
import subprocess
import sysconfig
from pathlib import Path

import pytest

# Shells start jobs in the background with SIGINT ignored, and commands that tests interrupt would
# inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


HERE = Path(__file__).parent
#: Markers of all tests in a folder; single tests are marked where they stand.
FOLDERS = {
    "conformance": ("slow",),
    "distributed": ("integration",),
    "emulation": ("emulation", "slow"),
    "faults": ("integration", "slow"),
    "guard": ("slow",),
    "mutants": ("slow",),
    "sglang": ("integration",),
    "thirdparty": ("integration", "slow"),
    "vllm": ("integration", "slow"),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by their folders."""
    for item in items:
        if not item.path.is_relative_to(HERE):  # those of the kit
            continue
        for marker in FOLDERS.get(item.path.relative_to(HERE).parts[0], ()):
            item.add_marker(marker)


@pytest.fixture(scope="session")
def stub_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub: one for all tests of a process, which loads one driver only."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    options = ["-O1", "-Wall", "-shared", "-fPIC", "-pthread", "-o", str(path)]
    source = Path(__file__).parent / "ktmoe" / "stub_driver.c"
    subprocess.run([*compiler, *options, str(source)], check=True)
    return path
