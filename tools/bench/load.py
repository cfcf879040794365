"""Times loading of a model's experts beside plain reading of the same bytes.

    python tools/bench/load.py FOLDER_OR_GGUF [-b BACKEND] [--layers 0,1] [--cold] [--rounds 3]

The bytes are those that ktk reads, in its order. Ways take turns:

  read   one thread reads them into one buffer of 8 MiB, again and again: what a disk gives, and
         what the page cache gives to a reader that keeps nothing
  keep   one thread reads them into fresh memory of huge pages that it keeps: the limit of a loader
         that leaves what it loads in memory of its own, for the system clears each page first
  load   ktk's loading: reading, packing, and what is packed

Warm, files are in the page cache. --cold drops them from it ahead of each turn
(posix_fadvise, and /proc/sys/vm/drop_caches where that may be written).

Ahead of each turn as much memory as is loaded is touched and given back: hypervisors take free
memory from a virtual machine, and the first touch of a page then costs ten times as much as the
second (1 GB/s on one of ours, beside 8 to 11). --fresh leaves that out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import ktk
from ktk.checkpoint.files import File
from ktk.unread import Unread

Range = tuple[Path, int, int]
_CHUNK = 8 << 20
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def recorded(load: Callable[[], object]) -> list[Range]:
    """Return what loading reads: files, and where and how many bytes."""
    ranges: list[Range] = []
    read = File.read

    def watched(self: File, begin: int, nbytes: int, later: Unread | None = None) -> np.ndarray:
        ranges.append((self.path, begin, nbytes))
        return read(self, begin, nbytes, later)

    setattr(File, "read", watched)  # noqa: B010
    try:
        load()
    finally:
        setattr(File, "read", read)  # noqa: B010
    return ranges


def read_into(ranges: list[Range], memory: Callable[[int], memoryview]) -> None:
    """Read ranges, each chunk of them into what `memory` gives for so many bytes."""
    opened: dict[Path, int] = {}
    try:
        for path, begin, nbytes in ranges:
            if path not in opened:
                opened[path] = os.open(path, os.O_RDONLY)
                os.posix_fadvise(opened[path], 0, 0, os.POSIX_FADV_SEQUENTIAL)
            for at in range(begin, begin + nbytes, _CHUNK):
                view = memory(min(_CHUNK, begin + nbytes - at))
                while view:
                    count = os.preadv(opened[path], [view], at)
                    view, at = view[count:], at + count
    finally:
        for number in opened.values():
            os.close(number)


def plain(ranges: list[Range]) -> None:
    """Read into one buffer."""
    buffer = memoryview(bytearray(_CHUNK))
    read_into(ranges, lambda nbytes: buffer[:nbytes])


def kept(ranges: list[Range]) -> None:
    """Read into memory that stays until the end."""
    used = 0
    with mmap.mmap(-1, sum(nbytes for _, _, nbytes in ranges), _PRIVATE) as whole:
        whole.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(whole)

        def fresh(nbytes: int) -> memoryview:
            nonlocal used
            used += nbytes
            return view[used - nbytes : used]

        read_into(ranges, fresh)
        view.release()


def drop(paths: set[Path]) -> None:
    """Take files out of the page cache."""
    for path in paths:
        number = os.open(path, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)
    caches = Path("/proc/sys/vm/drop_caches")
    if os.access(caches, os.W_OK):
        caches.write_text("1")


def touch(nbytes: int) -> None:
    """Write to each page of new memory, and give it back."""
    with mmap.mmap(-1, nbytes, _PRIVATE) as whole:
        whole.madvise(mmap.MADV_HUGEPAGE)
        np.frombuffer(whole, np.uint8)[:: mmap.PAGESIZE] = 1


def seconds(way: Callable[[], object], paths: set[Path], *, touched: int, cold: bool) -> float:
    """Return how long a way takes, without giving back what it made."""
    if touched:
        touch(touched)
    if cold:
        drop(paths)
    began = time.perf_counter()
    made = way()
    took = time.perf_counter() - began
    del made
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description="Loading beside plain reading.")
    parser.add_argument("path", type=Path)
    parser.add_argument("-b", "--backend")
    parser.add_argument("--layers", help="numbers, with commas between; default: all")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each turn")
    parser.add_argument("--fresh", action="store_true", help="do not touch memory before each turn")
    options = parser.parse_args()
    layers = [int(one) for one in options.layers.split(",")] if options.layers else None
    pool = ktk.WorkerPool(threads=options.threads) if options.threads else None

    def load() -> ktk.Model:
        return ktk.Model.from_checkpoint(
            options.path, options.backend, layers=layers, pool=pool, progress=False
        )

    ranges = recorded(load)
    paths = {path for path, _, _ in ranges}
    nbytes = sum(size for _, _, size in ranges)
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: plain(ranges),
        "keep": lambda: kept(ranges),
        "load": load,
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, way in ways.items():
            touched = 0 if options.fresh else nbytes + (256 << 20)
            took[name].append(seconds(way, paths, touched=touched, cold=options.cold))
    state = "cold" if options.cold else "warm"
    print(f"{nbytes / 1e9:.2f} GB in {len(ranges)} reads, {state}, median of {options.rounds}")
    rates = {name: nbytes / statistics.median(all_) / 1e9 for name, all_ in took.items()}
    for name, rate in rates.items():
        print(f"{name} {rate:6.2f} GB/s")
    print(f"load/read {rates['load'] / rates['read']:.2f}")
    print(f"load/keep {rates['load'] / rates['keep']:.2f}")


if __name__ == "__main__":
    main()
