"""Files that are there as a whole or not at all, and folders that one process writes at a time."""

from __future__ import annotations

import errno
import fcntl
import glob
import itertools
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ktk.errors import CheckpointError

# What the name of a file ends with until it is complete. Nobody else's files end so.
TEMPORARY = ".ktk-part"
LOCK = ".ktk.lock"

# Tells apart what this process writes.
_numbers = itertools.count()


class PendingFile:
    """A file of known size that appears under its name when `commit` is called.

    Space is taken at once, so that a full disk shows before the work and not after it.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._temporary, self._fd = _begun(path)
        try:
            with naming(path):
                _allocate(self._fd, size)
        except BaseException:
            self.discard()
            raise

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Write at a place; several threads may, each at its own."""
        view = memoryview(data)
        with naming(self.path):
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count

    def commit(self) -> None:
        """Bring the file to the disk, then give it its name."""
        with naming(self.path):
            _take_mode(self.path, self._fd)
            os.fsync(self._fd)
        # Still open, and so locked: else another writer might take it for a dead one's.
        os.replace(self._temporary, self.path)
        self._close()
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
    temporary, held = _begun(path)
    try:
        yield temporary
        # The block may have made another file of this name.
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(path):
                _take_mode(path, fd)
                os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        os.close(held)
        temporary.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give an error of the system the name of the file that it is about, if it has none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_temporaries(folder: Path) -> None:
    """Remove what interrupted processes left."""
    _remove_dead(folder, "*")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder; the lock goes with the process, however that ends.

    Raises
    ------
    CheckpointError
        Another process holds it.
    """
    path = folder / LOCK
    is_new = not path.exists()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"{folder} is being written by another process: wait for it, or choose another "
                "folder"
            ) from None
        try:
            yield
        except BaseException:
            if is_new:  # nothing of ours stays where nothing was begun
                path.unlink(missing_ok=True)
            raise
    finally:
        os.close(fd)


def _begun(path: Path) -> tuple[Path, int]:
    """Make an empty file beside `path` that is this call's alone; returns it, open and locked.

    Several processes may write the same path, and the last to end has it. What a killed one left
    goes here, with the next writer of the path. OSError for a path of what is there and no file: a
    device would be replaced.
    """
    if path.exists() and not path.is_file():
        kind = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(kind, os.strerror(kind) if path.is_dir() else "is no regular file", str(path))
    _remove_dead(path.parent, f"{glob.escape(path.name)}.*")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        made = path.with_name(f"{path.name}.{os.getpid()}-{next(_numbers)}{TEMPORARY}")
        try:
            fd = os.open(made, flags, 0o666)
        except FileExistsError:  # a process of another container has this number, too
            continue
        except OSError as error:
            error.filename = str(path)  # the one that the caller named
            raise
        # File systems without locks keep what killed processes left.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.path.lexists(made):
            return made, fd
        os.close(fd)  # somebody took it for a dead one's before it was locked


def _take_mode(path: Path, fd: int) -> None:
    """Let who may read and write a file be those who may what it replaces."""
    with suppress(FileNotFoundError):
        os.fchmod(fd, stat.S_IMODE(path.stat().st_mode))


def _has_writer(path: Path) -> bool:
    """Whether the process lives that a temporary file is named after."""
    match = re.search(rf"\.(\d+)-\d+{re.escape(TEMPORARY)}$", path.name)
    if match is None:
        return False
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


def _remove_dead(folder: Path, names: str) -> None:
    """Remove the temporary files whose writers are gone, and their locks with them."""
    for path in folder.glob(f"{names}{TEMPORARY}"):
        # What cannot be opened, locked or removed is another's. What a block of `replaced` made
        # anew has no lock.
        if _has_writer(path):
            continue
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _allocate(fd: int, size: int) -> None:
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        # Some network file systems cannot; there a full disk shows late.
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
