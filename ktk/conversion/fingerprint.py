"""Tells one checkpoint from another without reading all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from ktk.checkpoint.files import File, MissingFile
from ktk.errors import CheckpointError

# Of either end of a file: the headers of small files, and weights.
_SAMPLE = 1 << 16


def fingerprint(files: Iterable[Path], module: str | None = None) -> str:
    """Return a hash over names, sizes, beginnings and ends of files, and the module that is meant.

    Raises
    ------
    CheckpointError
        One of them is missing, or no regular file.
    """
    digest = hashlib.sha256()
    for path in sorted(files):
        try:
            file = File(path)
        except MissingFile as error:
            raise CheckpointError(
                f"{error}: a conversion needs all files of its source, also for some layers only"
            ) from None
        size, sample = file.size, min(file.size, _SAMPLE)
        digest.update(f"{path.name}\0{size}\0".encode())
        digest.update(file.read(0, sample).data)
        digest.update(file.read(size - sample, sample).data)
    if module is not None:
        digest.update(f"module\0{module}".encode())
    return digest.hexdigest()
