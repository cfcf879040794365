"""Which CPUs the workers have in each of SGLang's processes, however it divides a model."""

from __future__ import annotations

import os
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ktk
from ktk.sglang import place

CONTEXT = "sglang.srt.runtime_context"


def say(patch: pytest.MonkeyPatch, parallel: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Let SGLang say what a process is, and with which arguments it was started."""
    for name in ("sglang", "sglang.srt", CONTEXT):
        patch.setitem(sys.modules, name, ModuleType(name))
    context: Any = sys.modules[CONTEXT]
    context.get_parallel = lambda: SimpleNamespace(**{"tp_rank": 0} | parallel)
    context.get_server_args = lambda: SimpleNamespace(**{"tp_size": 1, "nnodes": 1} | arguments)


@pytest.fixture
def share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return which of how many shares of the CPUs a process gets, instead of a pool."""
    monkeypatch.setattr(place, "worker_pool", lambda mine, count, cpus: (mine, count))


def test_processes_share_the_cpus_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []
    for rank in range(2):
        say(monkeypatch, {"tp_rank": rank}, {"tp_size": 2})
        pools.append(set(place.pool_here().cpus))
    cpus = set(ktk.WorkerPool().cpus)
    assert pools[0] | pools[1] == cpus
    assert len(cpus) < 2 or not pools[0] & pools[1]


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize(
    ("rank_of", "arguments"),
    [
        ("pp_rank", {"pp_size": 2}),
        ("dp_rank", {"dp_size": 2}),
        ("tp_rank", {"tp_size": 2, "pp_size": 2, "nnodes": 2}),
        ("tp_rank", {"tp_size": 4, "nnodes": 2}),
    ],
)
def test_stages_and_replicas_share_them_too(
    monkeypatch: pytest.MonkeyPatch, rank_of: str, arguments: dict[str, int]
) -> None:
    found: list[Any] = []
    for rank in range(2):
        say(monkeypatch, {rank_of: rank}, arguments)
        found.append(place.pool_here())
    assert found == [(0, 2), (1, 2)]


@pytest.mark.usefixtures("share")
@pytest.mark.parametrize(
    "parallel",
    [{"dp_rank": 3, "dp_size": 4}, {"dp_rank": None, "dp_size": 1, "attn_dp_size": 4}],
    ids=["older", "newer"],
)
def test_attention_by_data_parallelism_has_no_processes(
    monkeypatch: pytest.MonkeyPatch, parallel: dict[str, Any]
) -> None:
    arguments = {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}
    say(monkeypatch, {"tp_rank": 3} | parallel, arguments)
    found: Any = place.pool_here()
    assert found == (3, 4)


def test_a_thread_that_was_bound_does_not_bind_the_workers() -> None:
    """SGLang binds the threads of OpenMP, and with them the one that loads the model."""
    code = f"""
import os, sys, types
every = os.sched_getaffinity(0)
for name in ("sglang", "sglang.srt", {CONTEXT!r}):
    sys.modules[name] = types.ModuleType(name)
sys.modules[name].get_parallel = lambda: types.SimpleNamespace(tp_rank=0)
sys.modules[name].get_server_args = lambda: types.SimpleNamespace(tp_size=1, nnodes=1)
from ktk.sglang import place
os.sched_setaffinity(0, {{min(every)}})
print(*sorted(place.pool_here().cpus))
assert os.sched_getaffinity(0) == {{min(every)}}
"""
    own = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")
    environment = {name: value for name, value in os.environ.items() if name not in own}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(cpu) for cpu in sorted(ktk.WorkerPool().cpus)]
