"""Runs a function in several processes that are the ranks of a group."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import queue
import runpy
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Processes start slowly where others use the machine.
_LIMIT = 240.0


class Ranks:
    """Processes that run `work(rank, size, *arguments)`, and what they return or raise.

    Attributes
    ----------
    processes
        By rank.
    results : dict of int to what was returned
        An exception that was raised is returned.
    """

    def __init__(self, size: int, work: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ktk-ranks")
        self._queue = context.Queue()
        # By file and name: a test's module has a name that only pytest knows.
        where = (inspect.getfile(work), work.__name__)
        self.results: dict[int, Any] = {}
        self.processes = [
            context.Process(
                target=_run,
                args=(rank, size, f"{self._folder.name}/store", self._queue, where, arguments),
                daemon=True,
            )
            for rank in range(size)
        ]
        for process in self.processes:
            process.start()

    def message(self) -> tuple[int, Any]:
        """Return the next (rank, what it put into the queue)."""
        end = time.monotonic() + _LIMIT
        while time.monotonic() < end:
            try:
                message: tuple[int, Any] = self._queue.get(timeout=1)
                return message
            except queue.Empty:
                if not any(process.is_alive() for process in self.processes):
                    break
        raise TimeoutError(f"ranks said nothing; exit codes {[p.exitcode for p in self.processes]}")

    def wait(self, ranks: set[int] | None = None) -> list[Any]:
        """Wait for ranks, by default all, and return what they returned."""
        wanted = set(range(len(self.processes))) if ranks is None else ranks
        while not wanted <= set(self.results):
            rank, (done, value) = self.message()
            if done:
                self.results[rank] = value
        return [self.results[rank] for rank in sorted(wanted)]

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.join(timeout=5)
            process.kill()
            process.join()
        self._folder.cleanup()


def run(size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return what each rank returned; raise what the first of them raised."""
    with Ranks(size, work, *arguments) as ranks:
        results = ranks.wait()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _run(rank: int, size: int, store: str, results: Any, where: Any, arguments: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=_LIMIT),
        )

        def say(value: Any) -> None:
            results.put((rank, (False, value)))

        file, name = where
        result = runpy.run_path(file)[name](rank, size, say, *arguments)
    except Exception as error:
        # Others cannot be sent: of some, what makes them takes no sentence.
        own = type(error).__module__ == "builtins"
        result = type(error)(str(error)) if own else RuntimeError(repr(error))
    results.put((rank, (True, result)))
    results.close()
    results.join_thread()
