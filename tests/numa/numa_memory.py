"""Where pages of this process lie, and who touches them first."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import ktk
from ktk import _core

NODES = [node for node in _core.topology()["nodes"] if node["has_memory"]]
PAGE = 4096
MOVE_PAGES = {"x86_64": 279, "aarch64": 239}[platform.machine()]
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Mapping:
    """Anonymous memory that is bound to a node: bytes [begin, end)."""

    begin: int
    end: int
    node: int

    @property
    def size(self) -> int:
        """Bytes."""
        return self.end - self.begin

    def data(self) -> np.ndarray:
        """Return the bytes, by reference."""
        return np.ctypeslib.as_array((ctypes.c_uint8 * self.size).from_address(self.begin))


def bound() -> list[Mapping]:
    """Return the mappings whose policy binds them to one node, by numa_maps."""
    ends = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = line.split()[0].split("-")
        ends[int(begin, 16)] = int(end, 16)
    found = []
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        begin, policy = line.split()[:2]
        if match := re.fullmatch(r"bind(?:=static)?:(\d+)", policy):
            found.append(Mapping(int(begin, 16), ends[int(begin, 16)], int(match[1])))
    return found


def added(before: Sequence[Mapping]) -> list[Mapping]:
    """Return what is bound now and was not before; neighbours may have become one."""
    old = sorted(before, key=lambda mapping: mapping.begin)
    found = []
    for now in bound():
        at = now.begin
        for known in old:
            if known.end <= at or known.begin >= now.end:
                continue
            if known.begin > at:
                found.append(Mapping(at, known.begin, now.node))
            at = known.end
        if at < now.end:
            found.append(Mapping(at, now.end, now.node))
    return found


def size_on(mappings: Sequence[Mapping], node: int) -> int:
    """Return the bytes that are bound to a node."""
    return sum(mapping.size for mapping in mappings if mapping.node == node)


def nodes_of(pages: Sequence[int]) -> list[int]:
    """Return the node of each page, by move_pages; negative where there is none yet."""
    addresses = (ctypes.c_void_p * len(pages))(*pages)
    status = (ctypes.c_int * len(pages))()
    count = ctypes.c_ulong(len(pages))
    if _libc.syscall(MOVE_PAGES, 0, count, addresses, None, status, 0) != 0:
        raise OSError(ctypes.get_errno(), "move_pages")
    return list(status)


def pages_by_node(mapping: Mapping) -> dict[int, int]:
    """Return how many pages of a mapping lie on each node; untouched ones are not counted."""
    found = np.array(nodes_of(range(mapping.begin, mapping.end, PAGE)))
    return {int(node): int((found == node).sum()) for node in np.unique(found) if node >= 0}


def pages_of_values(values: Sequence[int]) -> dict[int, list[int]]:
    """Return the pages that hold one of these 16-bit values and no other, in anonymous memory."""
    found: dict[int, list[int]] = {value: [] for value in values}
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access, _, _, inode = line.split()[:5]
        begin, end = (int(address, 16) for address in span.split("-"))
        if not access.startswith("rw") or inode != "0" or end - begin < 16 * PAGE:
            continue
        area = Mapping(begin, end, -1).data()
        # Pages that nobody touched are left so.
        for at, node in enumerate(nodes_of(range(begin, end, PAGE))):
            if node < 0:
                continue
            page = area[at * PAGE : (at + 1) * PAGE].view(np.uint16)
            if int(page[0]) in found and (page == page[0]).all():
                found[int(page[0])].append(begin + at * PAGE)
    return found


def tasks() -> set[int]:
    """Return the threads of this process."""
    return {int(task.name) for task in Path("/proc/self/task").iterdir()}


def workers_of(pool: ktk.WorkerPool, before: set[int]) -> dict[int, int]:
    """Return the worker that each thread of a pool is, of the threads that were not there before.

    Worker 0 is the calling thread.
    """
    found = {threading.get_native_id(): 0}
    for task in tasks() - before:
        name = Path(f"/proc/self/task/{task}/comm").read_text().strip()
        if name.startswith("ktk-"):
            found[task] = int(name.removeprefix("ktk-"))
    assert sorted(found.values()) == list(range(pool.size))
    return found


class _Touch(ctypes.Structure):
    _fields_ = (("page", ctypes.c_uint64), ("thread", ctypes.c_int32), ("cpu", ctypes.c_int32))


@dataclass(frozen=True)
class Read:
    """The first touch of a page: by which thread, on which CPU, and where the page lies."""

    page: int
    thread: int
    cpu: int
    node: int


class FirstReads:
    """first_reads.c, which is compiled already."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        self._library.unwatch.restype = ctypes.c_size_t

    @contextmanager
    def of(self, mappings: Sequence[Mapping]) -> Iterator[list[Read]]:
        """Fill a list with the first reads of these mappings in the block, in their order."""
        begins = (ctypes.c_uint64 * len(mappings))(*(one.begin for one in mappings))
        ends = (ctypes.c_uint64 * len(mappings))(*(one.end for one in mappings))
        reads: list[Read] = []
        assert self._library.watch(begins, ends, len(mappings)) == 0
        try:
            yield reads
        finally:
            at = ctypes.POINTER(_Touch)()
            count = self._library.unwatch(ctypes.byref(at))
        first: dict[int, _Touch] = {}
        for touch in at[:count]:
            first.setdefault(touch.page, touch)
        found = nodes_of(list(first)) if first else []
        reads.extend(
            Read(page, touch.thread, touch.cpu, node)
            for (page, touch), node in zip(first.items(), found, strict=True)
        )


def move_to(cpus: Sequence[int]) -> None:
    """Let the calling thread run on these CPUs only."""
    os.sched_setaffinity(0, cpus)
