"""What Linux says about this machine: how many CPUs there are, and who uses them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ktk import _core
from ktk.system import TICKS, cpu_ticks

T = TypeVar("T")


def check_threads(threads: int) -> None:
    """Refuse more threads than this process gets CPUs: times would be those of the scheduler.

    Raises
    ------
    ValueError
        With the number of CPUs, and what sets it.
    """
    cpus = len(os.sched_getaffinity(0))
    quota = _core.topology()["quota"]
    usable = min(cpus, quota or cpus)
    if threads > usable:
        whose = "the cgroup's quota pays for" if usable < cpus else "this process may use"
        raise ValueError(
            f"{threads} threads are more than the {usable} CPUs that {whose}; set {usable} or "
            "fewer (--threads, KTK_THREADS, ktk config threads)"
        )


class CpuWatch:
    """Says which share of the CPUs went to other processes since it was made."""

    _TICK = 1.0 / TICKS

    def __init__(self) -> None:
        self._cpus = os.sched_getaffinity(0)
        self._start = (time.perf_counter(), self._busy(), time.process_time())

    def _busy(self) -> float:
        """Seconds of any work on our CPUs since boot, stolen time included."""
        spent = (ticks for cpu, ticks in cpu_ticks().items() if cpu in self._cpus)
        return sum(ticks.busy + ticks.stolen for ticks in spent) * self._TICK

    def others(self) -> float:
        """Return the share, 0 to 1; the clock of the statistics (a tick per CPU) is forgiven."""
        begin, busy, own = self._start
        elapsed = time.perf_counter() - begin
        theirs = (self._busy() - busy) - (time.process_time() - own)
        theirs -= self._TICK * len(self._cpus)
        return max(0.0, theirs) / max(elapsed * len(self._cpus), 1e-9)


@dataclass(frozen=True)
class Measured(Generic[T]):
    """A measurement, and the share of the CPUs that others took from it."""

    value: T
    others: float


def undisturbed(measure: Callable[[], T], *, noise: float = 0.05, tries: int = 5) -> Measured[T]:
    """Repeat a measurement until other processes use less than `noise` of the CPUs meanwhile.

    After `tries` the quietest one is returned: a number with a warning is better than none.
    """
    best: Measured[T] | None = None
    for attempt in range(max(tries, 1)):
        if attempt:
            time.sleep(0.2)  # whatever it was, it may be short
        watch = CpuWatch()
        value = measure()
        found = Measured(value, watch.others())
        if best is None or found.others < best.others:
            best = found
        if best.others <= noise:
            break
    assert best is not None
    return best
