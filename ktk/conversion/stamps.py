"""Notices that files change while they are converted, or between two runs, without reading them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from ktk.checkpoint.packed.folder import Stamps
from ktk.errors import CheckpointError

# Kernels before 6.13 take times from a clock that ticks a hundred times a second at worst: a file
# that was written in this tick may be written again and keep its stamp.
_TICK_NS = 20_000_000


class SourceChange(CheckpointError):
    """Files of the source are not what they were."""


def stamps_of(files: Iterable[Path], root: Path) -> Stamps:
    """Return the stamps of files, by their names in `root`; waits for a tick if one is fresh."""
    paths = list(files)
    found = _look(paths, root)
    youngest = max((max(stamp[1:3]) for stamp in found.values()), default=0)
    if abs(time.time_ns() - youngest) < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)
        found = _look(paths, root)
    return found


def changed(before: Stamps, now: Stamps) -> list[str]:
    """Name the files that are not what they were."""
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _look(paths: Iterable[Path], root: Path) -> Stamps:
    found = {}
    for path in paths:
        try:
            # Opened, because that makes file systems of networks ask their server.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                continue
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        try:
            stat = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        name = os.path.relpath(path, root)
        found[name] = (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
    return found
