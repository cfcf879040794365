"""Tells one checkpoint from another without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ktk.errors import CheckpointError

# Of either end of a file: the headers of small files, and weights.
_SAMPLE = 1 << 16


def fingerprint(files: Iterable[Path]) -> str:
    """Return a hash over names, sizes, beginnings and ends of files.

    Raises
    ------
    CheckpointError
        One of them is missing.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing: a conversion needs all files of its source, also for some "
                "layers only"
            ) from None
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLE))
            file.seek(max(size - _SAMPLE, 0))
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()
