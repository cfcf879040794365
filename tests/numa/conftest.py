"""What tests of NUMA need: a machine of several nodes, which tools/numa/run emulates.

tools/numa/run                # anywhere
pytest tests/numa             # on a machine of two nodes or more
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from numa_memory import NODES, FirstReads  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, where memory can be in one place only."""
    if len(NODES) > 1:
        return
    skip = pytest.mark.skip(reason="needs two NUMA nodes; tools/numa/run emulates them")
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def affinity() -> Iterator[None]:
    """Give the test's thread back the CPUs that it had."""
    cpus = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, cpus)


@pytest.fixture(scope="session")
def first_reads(tmp_path_factory: pytest.TempPathFactory) -> FirstReads:
    """Compile first_reads.c, unless KTK_TEST_FIRST_READS says where it is."""
    if given := os.environ.get("KTK_TEST_FIRST_READS"):
        return FirstReads(Path(given))
    path = tmp_path_factory.mktemp("numa") / "first_reads.so"
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    options = ["-O1", "-Wall", "-shared", "-fPIC", "-o", str(path)]
    subprocess.run([*compiler, *options, str(HERE / "first_reads.c")], check=True)
    return FirstReads(path)
