"""Reads files of checkpoints into memory. They are never mapped.

A mapped file that somebody truncates ends the process by SIGBUS, and one that is written over gives
a mixture; files that are read give an error in either case. What that costs is one copy out of the
page cache, beside packing. Workers that read what they pack keep that copy in their caches.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np

from ktk.checkpoint.buffers import LEAST_KEPT, Buffers
from ktk.checkpoint.entries import MOST_JSON, EntryError, parse_object
from ktk.errors import CheckpointError
from ktk.unread import Unread

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class MissingFile(CheckpointError):
    """There is no such file; the message can be gone on with."""


class File:
    """A regular file that is to stay as it is while it is read.

    Any number of threads may read.

    Parameters
    ----------
    path
        It may be a link to a file.

    Raises
    ------
    CheckpointError
        It is missing (`MissingFile`), no regular file, or not to be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Opening a FIFO waits for a writer, and opening a device can do anything.
        self._state = _state(regular(path))
        self._opened: _Opened | None = None
        self._buffers = Buffers()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._state[0]

    def read(self, begin: int, nbytes: int, later: Unread | None = None) -> np.ndarray:
        """Return bytes of the file, uint8 [nbytes].

        Later reads use the memory again, once nobody uses the array. With `later`, what is large
        is not read but noted there, and the array may hold anything until it is.

        Raises
        ------
        CheckpointError
            The file ends before that, cannot be read, or has changed since it was opened first.
        """
        if begin + nbytes > self.size:
            raise CheckpointError(
                f"{self.path} is truncated: byte {begin + nbytes} is needed, it has {self.size}"
            )
        data = self._buffers.take(nbytes)
        view = data.data
        opened = self._open()
        if later is not None and nbytes >= LEAST_KEPT:
            later.add(opened, begin, data)
            return data
        try:
            # No posix_fadvise(WILLNEED): Linux then fills its cache by single pages, not by large
            # folios, and all of loading took 1.4 times as long.
            while view:
                count = os.preadv(opened.number, [view], begin)
                if not count:
                    break
                view, begin = view[count:], begin + count
        except OSError as error:
            raise opened.failed(error) from error
        opened.check()
        if view:
            raise opened.failed(None)
        return data

    def close(self) -> None:
        """Close the file and let go of memory; reading opens it again."""
        self._opened = None
        self._buffers.close()
        self._buffers = Buffers()

    def _open(self) -> _Opened:
        # Another thread may close it at any time, and does so by letting go of it.
        opened = self._opened
        if opened is None:
            opened = self._opened = _Opened(self.path, self._state)
        return opened


class _Opened:
    """An open file, until nobody uses it: see `OpenFile`."""

    def __init__(self, path: Path, state: tuple[int, int]) -> None:
        self.path = path
        self.number = -1
        self.state = state
        try:
            self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self.failed(error) from error

    def __del__(self) -> None:
        if self.number >= 0:
            os.close(self.number)

    def check(self) -> None:
        """Raise a `CheckpointError` if the file has changed since it was opened first."""
        try:
            changed = _state(os.fstat(self.number)) != self.state
        except OSError as error:
            raise self.failed(error) from error
        if changed:
            raise self.failed(None)

    def failed(self, error: OSError | None) -> CheckpointError:
        """Return what to raise for an error, or, for None, where the file is not what it was."""
        if error is not None:
            return CheckpointError(f"{self.path} cannot be read: {error.strerror}")
        return CheckpointError(
            f"{self.path} has changed since it was opened: is it being downloaded or copied? "
            "Load it again when that has ended"
        )


def regular(path: Path) -> os.stat_result:
    """Return what the system says of a regular file.

    Raises
    ------
    CheckpointError
        It is missing (`MissingFile`) or something else.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFile(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    kind = stat.S_IFMT(found.st_mode)
    if kind != stat.S_IFREG:
        raise CheckpointError(f"{path} is {_KINDS.get(kind, 'something else')}, expected a file")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a `CheckpointError` that names the file."""
    try:
        file = File(path)
        if file.size > MOST_JSON:
            raise EntryError(f"it has {file.size} bytes, expected no more than {MOST_JSON}")
        return parse_object(file.read(0, file.size).tobytes())
    except MissingFile:
        raise CheckpointError(f"{path} is missing: not a checkpoint folder") from None
    except EntryError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _state(found: os.stat_result) -> tuple[int, int]:
    # No inode: some file systems of networks give a file another one each time.
    return found.st_size, found.st_mtime_ns
