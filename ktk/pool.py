"""The worker pool that layers share unless they are given one."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Generic, ParamSpec, TypeVar

from ktk._core import WorkerPool

_P = ParamSpec("_P")
_T = TypeVar("_T")


class MadeOnce(Generic[_P, _T]):
    """A function whose result for the same arguments is made once, whichever threads ask first.

    A child of fork has none of its parent's threads, and makes results of its own.
    """

    def __init__(self, make: Callable[_P, _T]) -> None:
        functools.update_wrapper(self, make)
        self._made = functools.cache(make)
        self._turn = threading.RLock()
        os.register_at_fork(after_in_child=self._begin_anew)

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self._turn:
            return self._made(*args, **kwargs)  # type: ignore[arg-type]

    def forget(self) -> None:
        """Make results anew from now on."""
        self._made.cache_clear()

    def _begin_anew(self) -> None:
        # Another thread of the parent may have had its turn.
        self._turn = threading.RLock()
        self.forget()


_threads: int | None = None
_cpus: list[int] | None = None


@MadeOnce
def default_pool() -> WorkerPool:
    """Return the pool of this process, made at first use with one worker per physical core."""
    if _cpus is not None and (_threads is None or _threads <= len(_cpus)):
        return WorkerPool(cpus=_cpus[:_threads])
    return WorkerPool() if _threads is None else WorkerPool(threads=_threads)


def set_default_threads(threads: int) -> None:
    """Let the pool of this process have so many workers, from now on.

    Layers that are there already keep the pool they have.

    Raises
    ------
    RuntimeError, ValueError
        The system starts no such number of threads, or no machine has use for so many. Nothing has
        changed then.
    """
    global _threads
    if threads == _threads:
        return
    before, _threads = _threads, threads
    default_pool.forget()
    try:
        default_pool()
    except BaseException:
        _threads = before
        default_pool.forget()
        raise


def set_default_cpus(cpus: Sequence[int]) -> None:
    """Let the pool of this process have a worker on each of these CPUs.

    Layers that are there already keep the pool they have.
    """
    global _cpus
    if list(cpus) != _cpus:
        _cpus = list(cpus)
        default_pool.forget()
