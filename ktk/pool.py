"""The worker pool that layers share unless they are given one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache

from ktk._core import WorkerPool

_threads: int | None = None
_cpus: list[int] | None = None


@cache
def default_pool() -> WorkerPool:
    """Return the pool of this process, made at first use with one worker per physical core."""
    if _cpus is not None and (_threads is None or _threads <= len(_cpus)):
        return WorkerPool(cpus=_cpus[:_threads])
    return WorkerPool() if _threads is None else WorkerPool(threads=_threads)


def set_default_threads(threads: int) -> None:
    """Let the pool of this process have so many workers.

    Layers that are there already keep the pool they have.
    """
    global _threads
    if threads != _threads:
        _threads = threads
        default_pool.cache_clear()


def set_default_cpus(cpus: Sequence[int]) -> None:
    """Let the pool of this process have a worker on each of these CPUs.

    Layers that are there already keep the pool they have.
    """
    global _cpus
    if list(cpus) != _cpus:
        _cpus = list(cpus)
        default_pool.cache_clear()


# A child has none of its parent's threads; its first layer makes a pool of its own.
os.register_at_fork(after_in_child=default_pool.cache_clear)
