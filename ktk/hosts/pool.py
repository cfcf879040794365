"""The workers of ktk in one worker process of an engine: on the CPUs that this process has."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence

from ktk._core import WorkerPool, topology
from ktk.pool import MadeOnce

# What libgomp takes at most.
_CPUS = 65536


@MadeOnce
def worker_pool(rank: int, ranks: int, allowed: frozenset[int] = frozenset()) -> WorkerPool:
    """Return the pool of this process.

    vLLM, for one, binds the threads of OpenMP to the CPUs of a worker process, and the workers take
    the same ones: the two compute in turns. Where an engine does not, each process gets an even
    share of all.

    Parameters
    ----------
    rank, ranks
        Which of the worker processes on this machine it is.
    allowed
        CPUs that this process could use before its engine bound the calling thread to one.
    """
    # OpenMP may have bound this thread, and with it what it starts, to the first of its CPUs.
    before, bound = os.sched_getaffinity(0), bound_cpus(os.environ)
    os.sched_setaffinity(0, before | set(bound) | allowed)
    try:
        # Linux, as OpenMP, passes over CPUs that are not there.
        there = os.sched_getaffinity(0)
        bound = [cpu for cpu in bound if cpu in there]
        cores = [core for node in topology()["nodes"] for core in node["cores"]]
        cpus = bound or share(cores, rank, ranks)
        return WorkerPool(threads=len(cpus), cpus=cpus)
    finally:
        os.sched_setaffinity(0, before)


def bound_cpus(environment: Mapping[str, str]) -> list[int]:
    """Return the CPUs that OpenMP's threads are bound to, as its variables say; none if not.

    A value that makes no sense binds nothing, as in OpenMP. CPUs may be none of this machine's.
    """
    lists = {
        "GOMP_CPU_AFFINITY": r"([\d\s,:-]+)",
        "KMP_AFFINITY": r".*proclist=\[([\d,:-]+)\].*",
        "OMP_PLACES": r"\{([\d,-]+)\}",
    }
    for name, pattern in lists.items():
        match = re.fullmatch(pattern, environment.get(name, ""), re.ASCII)
        if match and (cpus := _numbers(match[1])):
            return cpus
    return []


def share(cores: Sequence[int], rank: int, ranks: int) -> list[int]:
    """Return the CPUs of one of several processes: its own, as long as there are enough."""
    first, behind = (len(cores) * at // ranks for at in (rank, rank + 1))
    return list(cores[first:behind]) or [cores[rank % len(cores)]]


def _numbers(text: str) -> list[int]:
    """Return the numbers of spans such as "3", "1-2" and "4-15:2"; none if one is no span."""
    found: dict[int, None] = {}
    for span in re.split(r"[\s,]+", text.strip(" \t\n,")):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", span, re.ASCII)
        if match is None:
            return []
        first, last, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
        if not (first <= last < _CPUS and step):
            return []
        found.update(dict.fromkeys(range(first, last + 1, step)))
    return list(found)
