"""What an earlier run left in a folder, and which of its layers can stay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import xxhash

from ktk.checkpoint.detect import is_packed
from ktk.checkpoint.packed.folder import Index, read_index
from ktk.checkpoint.packed.header import Header
from ktk.checkpoint.packed.layer import DamagedLayer, PackedLayer, open_layer
from ktk.checkpoint.pieces import digest
from ktk.checkpoint.reader import CheckpointReader, LayerReader
from ktk.conversion.stamps import changed
from ktk.durable import LOCK, TEMPORARY
from ktk.errors import CheckpointError

logger = logging.getLogger(__name__)


def merged(folder: Path, mine: Index, *, resume: bool) -> Index:
    """Return what the folder is to hold, what it holds already included.

    The stamps are those of what it holds.

    Raises
    ------
    CheckpointError
        The folder holds anything else than an earlier part of this conversion.
    """
    if not is_packed(folder):
        check_empty(folder)
        return mine
    if not resume:
        raise CheckpointError(
            f"{folder} holds a conversion already: go on with it by --resume, or choose another "
            "folder"
        )
    earlier = read_index(folder)
    check_options(folder, earlier, mine, ("backend", "group_size", "activation", "top_k"))
    if earlier.source != mine.source:
        names = ", ".join(changed(earlier.stamps, mine.stamps))
        raise CheckpointError(
            f"{folder} was begun from {earlier.source_name}, whose files were not those "
            f"of {mine.source_name}{names and ': ' + names}; choose another folder"
        )
    return replace(earlier, layers=tuple(sorted({*earlier.layers, *mine.layers})))


def check_empty(folder: Path) -> None:
    """Refuse a folder with anything but what an interrupted start leaves."""
    foreign = [
        path.name
        for path in sorted(folder.iterdir())
        if path.name != LOCK and not path.name.endswith(TEMPORARY)
    ]
    if foreign:
        raise CheckpointError(
            f"{folder} is not empty, it holds {foreign[0]}: choose another folder"
        )


def whole(path: Path, header: Header) -> PackedLayer | None:
    """Return a finished layer; None, with a word, where it is damaged. Reads all of it."""
    try:
        layer = open_layer(path)
        if not layer.header.same_content(header):
            raise CheckpointError(f"{path} is of another conversion: remove it")
        layer.verify()
    except DamagedLayer as error:
        logger.warning("layer %d has to be converted again: %s", header.layer, error)
        return None
    return layer


def is_current(layer: PackedLayer, read: Callable[[], int], source: Path) -> bool:
    """Whether a finished layer was made of what `read` finds in the source now."""
    if layer.header.read is not None and layer.header.read == read():
        return True
    what = (
        "does not say what it was made of"
        if layer.header.read is None
        else (f"was made of other weights than {source} holds now")
    )
    logger.warning("layer %d has to be converted again: %s %s", layer.number, layer.path, what)
    return False


def read_of(checkpoint: CheckpointReader, layer: LayerReader) -> int:
    """Read all experts of a layer, and return the checksum of that."""
    found = []
    for expert in range(layer.config.num_experts):
        found.append(digest(layer.pieces(expert)))
        # Files that were read count as memory of this process.
        checkpoint.close()
    return joined(found)


def joined(digests: list[int]) -> int:
    """Return the checksum of a layer from those of its experts."""
    found: int = xxhash.xxh3_64_intdigest(b"".join(one.to_bytes(8, "little") for one in digests))
    return found


def check_options(folder: Path, earlier: object, mine: object, names: Iterable[str]) -> None:
    """Refuse to go on with options other than those that a folder was begun with."""
    for what in names:
        was, now = getattr(earlier, what), getattr(mine, what)
        if was != now:
            option = f"--{what.replace('_', '-')}"
            cure = f"leave {option} out" if was is None else f"say {option} {was} again"
            raise CheckpointError(
                f"{folder} was begun with the {what} {was}, not {now}: {cure}, or choose another "
                "folder"
            )
