"""Entry points of what is installed, read again when something was installed since.

Reading the metadata of all packages takes 20 ms and more, and loading a model asks some forty
times. Whatever installs or removes a package adds or removes an entry of a folder on sys.path, and
the folder's time of change says so.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint

# Within one tick of its clock, a file system can change a folder twice and say nothing. The
# coarsest ticks, two seconds, are FAT's.
_TICK = 2_000_000_000

_Stamp = tuple[tuple[str, int | None], ...]
_read: dict[str, tuple[_Stamp, tuple[EntryPoint, ...]]] = {}


def entry_points(group: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group, as `importlib.metadata` does.

    Parameters
    ----------
    group
        Such as "ktk.backends".
    """
    stamp = _stamp()
    if stamp is not None and group in _read:
        known, found = _read[group]
        if known == stamp:
            return found
    now = time.time_ns()
    found = tuple(importlib.metadata.entry_points(group=group))
    if stamp is not None and all(when is None or now - when > _TICK for _, when in stamp):
        _read[group] = stamp, found
    return found


def _stamp() -> _Stamp | None:
    """Return what changes with what is installed; None if something else than folders tells."""
    finders = [one for one in sys.meta_path if hasattr(one, "find_distributions")]
    if finders != [PathFinder]:
        return None
    return tuple((path, _changed(path)) for path in sys.path)


def _changed(path: str) -> int | None:
    try:
        return os.stat(path or ".").st_mtime_ns
    except (OSError, ValueError):
        return None
