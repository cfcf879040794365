"""Checks downloaded files against their names: the hub's cache calls a file by its checksum."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ktk.checkpoint.files import MissingFile, regular
from ktk.errors import CheckpointError

# Of large files SHA-256, of others what git calls a blob of this content.
_SHA256, _GIT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_READ = 1 << 22


@dataclass(frozen=True)
class Blob:
    """A file of a model in the hub's cache.

    Attributes
    ----------
    path
        In the snapshot.
    target
        The file that this links to; its name is the checksum.
    nbytes
        Size; 0 where the file is missing, or nobody may ask.
    """

    path: Path
    target: Path

    @property
    def nbytes(self) -> int:
        """Bytes of the file; 0 where it is missing, or nobody may ask."""
        try:
            return regular(self.target).st_size
        except CheckpointError:
            return 0

    def check(self, on_read: Callable[[int], None] = lambda nbytes: None) -> None:
        """Read the file and compare its checksum.

        Parameters
        ----------
        on_read
            Called with the bytes of each part that was read.

        Raises
        ------
        CheckpointError
            The file is missing, cannot be read, or differs.
        """
        try:
            nbytes = regular(self.target).st_size
        except MissingFile:
            raise CheckpointError(f"{self.path} links to {self.target}, which is missing") from None
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {error}") from None
        name = self.target.name
        found = hashlib.sha256() if _SHA256.fullmatch(name) else hashlib.sha1()
        if _GIT.fullmatch(name):
            found.update(f"blob {nbytes}\0".encode())
        for data in self._parts():
            found.update(data)
            on_read(len(data))
        if found.hexdigest() != name:
            raise CheckpointError(
                f"{self.path} is damaged: its checksum is {found.hexdigest()}, not {name}. Remove "
                f"{self.target}, and download it again"
            )

    def _parts(self) -> Iterator[bytes]:
        try:
            with self.target.open("rb") as file:
                while data := file.read(_READ):
                    yield data
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: {self.target} cannot be read: {error.strerror}"
            ) from error


def blobs_of(path: Path) -> Iterator[Blob]:
    """Yield the files of a snapshot in the hub's cache, or the one file given; else nothing."""
    for link in sorted(path.rglob("*")) if os.path.isdir(path) else [path]:
        if not os.path.islink(link):
            continue
        target = link.parent / link.readlink()
        named = _SHA256.fullmatch(target.name) or _GIT.fullmatch(target.name)
        if named and target.parent.name == "blobs":
            yield Blob(link, target)
