"""Says what a folder of packed files holds, reading headers only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.packed.folder import file_of
from ktk.packed.read import PackedCheckpoint


@dataclass(frozen=True)
class PackedFile:
    """The experts of one layer.

    Attributes
    ----------
    layer
        Number of the layer in the model.
    path
        Its file.
    backend
        What it was converted for.
    formats
        Of gate, up and down.
    config
        Sizes and activation function.
    nbytes
        Size of the file; about what a loaded layer takes.
    """

    layer: int
    path: Path
    backend: str
    formats: Mapping[str, Format]
    config: ExpertConfig
    nbytes: int


def describe_folder(path: str | Path) -> tuple[list[PackedFile], list[int]]:
    """Return the layers that are there, and the numbers of those still to be converted.

    Raises
    ------
    CheckpointError
        The folder was not made by `ktk convert`, or one of its files is damaged.
    """
    with PackedCheckpoint(path) as checkpoint:
        numbers = checkpoint.layers()
        missing = [n for n in numbers if not file_of(checkpoint.folder, n).exists()]
        layers = [checkpoint.layer(n) for n in numbers if n not in missing]
        return [
            PackedFile(
                layer=layer.number,
                path=layer.path,
                backend=layer.header.backend,
                formats=layer.header.layout.formats,
                config=layer.header.layout.config,
                nbytes=layer.nbytes,
            )
            for layer in layers
        ], missing
