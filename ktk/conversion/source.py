"""The checkpoint that is converted, and whether it stays as it is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ktk.checkpoint.open import open_checkpoint
from ktk.closing import Closing
from ktk.conversion.fingerprint import fingerprint
from ktk.conversion.stamps import SourceChange, changed, stamps_of
from ktk.errors import CheckpointError


def name_of(source: Path) -> str:
    """Return what a checkpoint is called: by the hub, where it lies in the hub's cache."""
    repository = source.absolute().parent.parent.name
    if source.absolute().parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return source.name


class Source(Closing):
    """An open checkpoint, or a module of one, whose files are watched.

    Attributes
    ----------
    path : Path
        What was opened.
    checkpoint : CheckpointReader
        Reads it.
    fingerprint : str
        Tells it from other checkpoints.
    stamps : Stamps
        Of its files, as they were before anything was read that is used.
    """

    def __init__(self, path: Path, module: str | None = None, **options: Any) -> None:
        self.path = path
        self._root = path if path.is_dir() else path.parent
        with open_checkpoint(path, module=module, **options) as checkpoint:
            files = checkpoint.files()
        self.fingerprint = fingerprint(files, module)
        # From here on: headers are read once more.
        self.stamps = stamps_of(files, self._root)
        self.checkpoint = open_checkpoint(path, module=module, **options)

    def layers(self, wanted: Iterable[int] | None) -> list[int]:
        """Return the layers that are wanted, by default all that have experts.

        Raises
        ------
        CheckpointError
            One of them has none.
        """
        there = self.checkpoint.layers()
        numbers = there if wanted is None else list(wanted)
        missing = [layer for layer in numbers if layer not in there]
        if missing or not there:
            raise CheckpointError(
                f"{self.path} has no experts that ktk knows by name"
                + (f" in layer {missing[0]}" if missing else "")
            )
        return numbers

    def check(self) -> None:
        """Raise SourceChange if a file is not what it was."""
        now = stamps_of((self._root / name for name in self.stamps), self._root)
        if names := changed(self.stamps, now):
            raise SourceChange(
                f"{', '.join(str(self._root / name) for name in names)} changed while "
                f"{self.path} was converted"
            )

    def close(self) -> None:
        """Close the files."""
        self.checkpoint.close()
