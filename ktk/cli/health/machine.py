"""The machine as its files in /proc and /sys describe it, below a root that tests can plant."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ktk import _core, system

CPUS = "sys/devices/system/cpu"
NODES = "sys/devices/system/node"
#: How long two samples of a counter are apart: 50 ticks of /proc/stat.
SECONDS = 0.5


@dataclass(frozen=True)
class Process:
    """What counters of one process say, in ticks of CPU time and bytes."""

    pid: int
    name: str
    ticks: int
    resident: int
    swapped: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


@dataclass(frozen=True)
class Sample:
    """Counters at one moment: CPU time by CPU and by process, and pages to and from swap."""

    cpus: dict[int, system.Ticks]
    processes: dict[int, Process]
    swapped_pages: int


@dataclass(frozen=True)
class Machine:
    """What checks look at.

    Attributes
    ----------
    root
        The folder that has proc and sys.
    cpus
        The CPUs that this process may use.
    detected
        Instruction sets that ktk found.
    pause
        Lets some seconds pass between two samples.
    """

    root: Path = system.ROOT
    cpus: list[int] = field(default_factory=lambda: sorted(os.sched_getaffinity(0)))
    detected: list[str] = field(default_factory=lambda: list(_core.detected_isa()))
    pause: Callable[[float], None] = time.sleep

    def text(self, path: str) -> str:
        """Return what is in a file, without white space around it; empty where there is none."""
        return system.read(self.root / path).strip()

    def number(self, path: str) -> int | None:
        """Return the number in a file; None where there is none."""
        text = self.text(path)
        return int(text) if text.isdecimal() else None

    def listed(self, path: str) -> list[int] | None:
        """Return the numbers of a list like "0-3,8"; None where there is no such file."""
        text = self.text(path)
        return system.numbers_of(text) if text else None

    def entry(self, path: str, name: str) -> str:
        """Return what follows "name:" in a file of such lines; empty without one."""
        for line in self.text(path).splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
        return ""

    @cached_property
    def topology(self) -> dict[str, Any]:
        """Nodes, cores and CPUs that may be used, and the workers that ktk takes by default."""
        return dict(_core.read_topology(str(self.root), self.cpus))

    @cached_property
    def whole(self) -> dict[str, Any]:
        """The same for all CPUs that are online."""
        online = self.listed(f"{CPUS}/online") or self.cpus
        return dict(_core.read_topology(str(self.root), online))

    @cached_property
    def samples(self) -> tuple[Sample, Sample]:
        """Counters now and half a second later: all checks look at the same two."""
        first = self._sample()
        self.pause(SECONDS)
        return first, self._sample()

    def siblings(self, cpu: int) -> list[int]:
        """Return the hardware threads of the core of a CPU, itself included."""
        return self.listed(f"{CPUS}/cpu{cpu}/topology/thread_siblings_list") or [cpu]

    def _sample(self) -> Sample:
        moved = 0
        for line in self.text("proc/vmstat").splitlines():
            name, _, value = line.partition(" ")
            if name in ("pswpin", "pswpout"):
                moved += int(value)
        found = {one.pid: one for one in self._processes()}
        return Sample(system.cpu_ticks(self.root), found, moved)

    def _processes(self) -> Iterator[Process]:
        """Yield all processes but this one, and but those that end meanwhile."""
        for folder in (self.root / "proc").glob("[0-9]*"):
            pid = int(folder.name)
            # "17 (a name (of any kind)) R 1 ...": utime and stime are fields 14 and 15.
            name, _, rest = system.read(folder / "stat").partition("(")[2].rpartition(")")
            fields = rest.split()
            if len(fields) < 13 or pid == os.getpid():
                continue
            memory = {"VmRSS": 0, "VmSwap": 0}
            for line in system.read(folder / "status").splitlines():
                key, _, value = line.partition(":")
                if key in memory:
                    memory[key] = int(value.split()[0]) * 1024
            ticks = int(fields[11]) + int(fields[12])
            yield Process(pid, name, ticks, memory["VmRSS"], memory["VmSwap"])
