"""The folder that a conversion makes: a file per layer, and what is common to them.

ktk_packed.json             backend, groups, source and layers of the conversion
config.json                 of the source, where it has one
layer-00003.safetensors     the experts of layer 3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ktk.checkpoint.detect import PACKED_INDEX
from ktk.checkpoint.entries import EntryError, integer, integers, items, object_bytes, table, text
from ktk.checkpoint.files import read_json
from ktk.checkpoint.packed.header import LAST_LAYER, VERSION
from ktk.durable import write_file
from ktk.errors import CheckpointError

# No model has a tenth of that; a number keeps damage from taking minutes.
_MOST_LAYERS = 10_000
# Times in ns, inodes.
_ANY = (1 << 64) - 1

# Size, times of the last change of content and of inode in ns, inode; by name of the file.
Stamps = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Index:
    """What a folder of packed files is to hold.

    Attributes
    ----------
    backend
        Name of the backend.
    group_size
        Columns per scale that were asked for; None for what the source has or the backend likes.
    source
        Fingerprint of the checkpoint.
    source_name
        What that was called.
    layers
        All layers of the conversion, those that are not there yet included.
    stamps
        Of the source's files: all layers that are there were made of what they hold.
    activation, top_k
        What was asked for where the source does not say it, or not right; None if nothing was.
    """

    backend: str
    group_size: int | None
    source: str
    source_name: str
    layers: tuple[int, ...]
    stamps: Stamps = field(default_factory=dict)
    activation: str | None = None
    top_k: int | None = None


def file_of(folder: Path, layer: int) -> Path:
    """Return the file of a layer."""
    return folder / f"layer-{layer:05d}.safetensors"


def read_index(folder: Path) -> Index:
    """Read what a folder is to hold.

    Raises
    ------
    CheckpointError
        The index is missing, damaged or of another version.
    """
    path = folder / PACKED_INDEX
    entries: dict[str, Any] = read_json(path)
    if entries.get("version") != VERSION:
        raise CheckpointError(
            f"{path} has version {entries.get('version')} of ktk's packed files, and this ktk "
            f"reads version {VERSION}"
        )
    try:
        groups, top_k = entries.get("group_size"), entries.get("top_k")
        activation = entries.get("activation")
        layers = items("layers", entries.get("layers"))
        if len(layers) > _MOST_LAYERS:
            raise EntryError(f"layers lists {len(layers)}, expected no more than {_MOST_LAYERS}")
        return Index(
            backend=text("backend", entries.get("backend")),
            group_size=None if groups is None else integer("group_size", groups),
            source=text("source", entries.get("source")),
            source_name=text("source_name", entries.get("source_name")),
            layers=tuple(sorted(set(integers("layers", layers, most=LAST_LAYER)))),
            stamps={
                name: integers(f"the stamp of {name}", stamp, 4, most=_ANY)
                for name, stamp in table("stamps", entries.get("stamps", {})).items()
            },
            activation=None if activation is None else text("activation", activation),
            top_k=None if top_k is None else integer("top_k", top_k),
        )
    except EntryError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def write_index(folder: Path, index: Index) -> None:
    """Write what a folder is to hold."""
    entries = {"version": VERSION, **asdict(index)}
    write_file(folder / PACKED_INDEX, object_bytes(entries))
