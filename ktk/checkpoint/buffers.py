"""Memory for what is read, used again: fresh pages cost as much as the bytes that go into them.

The system clears each page that a process touches first, and on virtual machines the hypervisor may
have to find it. An allocator gives large pieces back as soon as they are free, so that reading
experts one by one would pay for every page of the file.
"""

from __future__ import annotations

import mmap
import weakref
from collections import defaultdict

import numpy as np

#: Bytes from which on allocators give a piece back at once, as glibc does to begin with. Of a
#: checkpoint, smaller pieces are scales and the like, which are always read at once.
LEAST_KEPT = 128 << 10
#: Bytes up to which a piece is kept: an output head that is read once would stay for nothing.
_MOST = 64 << 20


class Buffers:
    """Pieces of memory, each lent as an array until nobody uses the array or a view of it.

    Any number of threads may take pieces. What was given back is kept for the next piece of the
    same size, of each size as much as was in use at once; nothing is, from `close` on. Small and
    very large pieces are not kept.
    """

    def __init__(self) -> None:
        self._closed = False
        # Lists, whose append and pop are atomic: arrays may end in any thread, and in the middle of
        # any line of this file.
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)

    def take(self, nbytes: int) -> np.ndarray:
        """Return memory that may hold anything, uint8 [nbytes].

        Raises
        ------
        MemoryError
            There is not as much.
        """
        if not LEAST_KEPT <= nbytes <= _MOST:
            return np.empty(nbytes, np.uint8)
        try:
            piece = self._free[nbytes].pop()
        except IndexError:
            piece = _fresh(nbytes)
        # The array owns no memory and has a base that is no array: so it is itself the base of all
        # views, and ends behind them.
        array = np.frombuffer(piece, np.uint8)
        weakref.finalize(array, self._give, piece).atexit = False
        return array

    def close(self) -> None:
        """Let go of what is kept; what is lent goes when nobody uses it."""
        self._closed = True
        self._free.clear()

    def _give(self, piece: mmap.mmap) -> None:
        if not self._closed:
            self._free[len(piece)].append(piece)


def _fresh(nbytes: int) -> mmap.mmap:
    try:
        return mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {nbytes} bytes that are to be read") from error
