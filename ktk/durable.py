"""Files that are there as a whole or not at all, and folders that one process writes at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ktk.errors import CheckpointError

# What a file is called until it is complete; whoever holds the lock may remove it.
TEMPORARY = ".part"
LOCK = ".ktk.lock"


class PendingFile:
    """A file of known size that appears under its name when `commit` is called.

    Space is taken at once, so that a full disk shows before the work and not after it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._temporary = path.with_name(path.name + TEMPORARY)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(self._temporary, flags, 0o666)
        try:
            _allocate(self._fd, size)
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write at a place; several threads may, each at its own."""
        view = memoryview(data)
        while view:
            count = os.pwrite(self._fd, view, offset)
            view, offset = view[count:], offset + count

    def commit(self) -> None:
        """Bring the file to the disk, then give it its name."""
        os.fsync(self._fd)
        self._close()
        os.replace(self._temporary, self.path)
        # A new name is safe when its folder is.
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove what was written, also after a `commit` that failed."""
        self._close()
        self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        # Once: the number may be another file's by then.
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file, or replace it."""
    pending = PendingFile(path, len(data))
    try:
        pending.write(data, 0)
        pending.commit()
    except BaseException:
        pending.discard()
        raise


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield where to write a file of any size, which has its name when the block ends well."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        yield temporary
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temporaries(folder: Path) -> None:
    """Remove what an interrupted process left; only under the lock."""
    for path in folder.glob(f"*{TEMPORARY}"):
        path.unlink()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder; the lock goes with the process, however that ends.

    Raises
    ------
    CheckpointError
        Another process holds it.
    """
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being written by another process: wait for it, or choose another "
                "folder"
            ) from None
        yield
    finally:
        os.close(fd)


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # Some network file systems cannot; there a full disk shows late.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
