"""What a folder says of the conversion that it was begun for, so that one can go on with it.

ktk_conversion.json is the first file that is written. Whoever changes what is in it finds that out
and begins anew; hosts do not read it.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ktk.checkpoint.entries import EntryError, integer, integers, object_bytes, table, text
from ktk.checkpoint.files import read_json
from ktk.checkpoint.packed.folder import Stamps
from ktk.conversion.resume import check_empty, check_options
from ktk.conversion.stamps import changed
from ktk.durable import write_file
from ktk.errors import CheckpointError

logger = logging.getLogger(__name__)

STATE = "ktk_conversion.json"
_VERSION = 1
# Times in ns, inodes.
_ANY = (1 << 64) - 1


@dataclass(frozen=True)
class State:
    """A conversion.

    Attributes
    ----------
    to
        The format.
    group_size
        Columns that share a scale; 0 for whole rows.
    source
        Fingerprint of the checkpoint.
    source_name
        What that was called.
    stamps
        Of the source's files: all that is there was made of what they hold.
    """

    to: str
    group_size: int
    source: str
    source_name: str
    stamps: Stamps


def take_over(folder: Path, mine: State, *, resume: bool) -> bool:
    """Look at what an earlier run left; returns whether it was made of what the source is now.

    Raises
    ------
    CheckpointError
        The folder holds anything else than an earlier part of this conversion.
    """
    if not os.path.lexists(folder / STATE):
        check_empty(folder)
        return True
    if not resume:
        raise CheckpointError(
            f"{folder} holds a conversion already: go on with it by --resume, or choose another "
            "folder"
        )
    earlier = _read(folder / STATE)
    check_options(folder, earlier, mine, ("to", "group_size"))
    names = ", ".join(changed(earlier.stamps, mine.stamps))
    if earlier.source != mine.source:
        raise CheckpointError(
            f"{folder} was begun from {earlier.source_name}, whose files were not those of "
            f"{mine.source_name}{names and ': ' + names}; choose another folder"
        )
    if names:
        logger.warning("%s changed since %s was begun: all is made again", names, folder)
    return not names


def write_state(folder: Path, state: State) -> None:
    """Write what a folder is to hold."""
    entries = {"version": _VERSION, **asdict(state)}
    write_file(folder / STATE, object_bytes(entries))


def _read(path: Path) -> State:
    entries = read_json(path)
    try:
        integer("version", entries.get("version"), _VERSION, _VERSION)
        return State(
            to=text("to", entries.get("to")),
            group_size=integer("group_size", entries.get("group_size")),
            source=text("source", entries.get("source")),
            source_name=text("source_name", entries.get("source_name")),
            stamps={
                name: integers(f"the stamp of {name}", stamp, 4, most=_ANY)
                for name, stamp in table("stamps", entries.get("stamps")).items()
            },
        )
    except EntryError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
