"""OpenMP, which torch computes with, may bind each of its threads to one place."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ktk import _core

_BOUND = """
import os
before = os.sched_getaffinity(0)
import torch
x = torch.ones(1 << 20)
x + x
assert len(os.sched_getaffinity(0)) < len(before), "OpenMP has bound no thread"
from ktk.pool import default_pool
cpus = default_pool().cpus
assert len(cpus) > 1, cpus
assert set(cpus) <= before, cpus
"""


@pytest.mark.slow
@pytest.mark.skipif(_core.topology()["default_threads"] < 2, reason="there is one core")
@pytest.mark.parametrize("variable", ["OMP_PROC_BIND=true", "OMP_PLACES=cores"])
def test_bound_threads_leave_the_workers_their_cpus(variable: str) -> None:
    name, _, value = variable.partition("=")
    environment = os.environ | {name: value}
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run([sys.executable, "-c", _BOUND], check=True, env=environment)
