"""Tells GGUF, safetensors and packed files apart by names alone, without importing a reader."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ktk.checkpoint.files import MissingFile, regular
from ktk.errors import CheckpointError

# What `ktk convert` writes beside its files.
PACKED_INDEX = "ktk_packed.json"
# How hubs name models: who, and what.
_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Where models are looked for below a folder that is none: a cache of a hub has them three below.
_DEPTH, _MOST_FOLDERS, _SHOWN = 3, 1000, 5


def is_gguf(path: str | Path) -> bool:
    """Whether a path is to be read as GGUF: a file, or a folder of .gguf without safetensors."""
    path = Path(path)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.is_file() or path.suffix == ".gguf"


def is_packed(path: str | Path) -> bool:
    """Whether a folder was made by `ktk convert`."""
    return os.path.lexists(os.path.join(path, PACKED_INDEX))


def check_path(path: str | Path) -> None:
    """Refuse a path that can be none of a checkpoint, and say what to give instead.

    Raises
    ------
    CheckpointError
        There is nothing, a file of a checkpoint instead of its folder, or a folder of models.
    """
    path = Path(path)
    shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:80]}...{str(path)[-80:]}"
    try:
        is_folder = path.is_dir()
        if not is_folder:
            regular(path)
    except MissingFile:
        raise CheckpointError(_missing(path, shown)) from None
    except (CheckpointError, OSError, ValueError) as error:
        reason = str(error).replace(str(path), shown)
        raise CheckpointError(f"{shown} cannot be read: {reason}") from None
    if is_folder:
        _check_folder(path)
    elif path.suffix in (".safetensors", ".json"):
        raise CheckpointError(f"{path} is one file of a checkpoint: give its folder, {path.parent}")


def _missing(path: Path, shown: str) -> str:
    name = str(path)
    is_hub = _HUB.fullmatch(name) and not path.parent.exists() and path.suffix != ".gguf"
    if not is_hub:
        return f"{shown} is missing: there is no such folder or file"
    return (
        f"there is no folder {name}. If that is a model of the Hugging Face hub, hf download "
        f"{name} puts it into the hub's cache, where ktk.hub.find_model({name!r}) finds it"
    )


def _check_folder(path: Path) -> None:
    if is_model(path):
        return
    models = [str(found) for found in models_below(path)]
    if not models:
        raise CheckpointError(
            f"{path} is no checkpoint: it has neither config.json nor *.safetensors nor *.gguf"
        )
    more = f" and {len(models) - _SHOWN} more" if len(models) > _SHOWN else ""
    raise CheckpointError(
        f"{path} is no checkpoint, but a folder of some: give one of "
        f"{', '.join(models[:_SHOWN])}{more}"
    )


def is_model(folder: Path) -> bool:
    """Whether a folder holds what is read as a checkpoint, or a part of it."""
    return (
        is_packed(folder)
        or os.path.lexists(folder / "config.json")
        or any(name.endswith((".safetensors", ".gguf")) for name in _names(folder))
    )


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def models_below(folder: Path) -> Iterator[Path]:
    """Yield folders that hold models, near ones first, as far as that does not take long."""
    level, seen = [folder], 0
    for _ in range(_DEPTH):
        below = []
        for parent in level:
            below += sorted(_folders(parent))
        for found in below[: _MOST_FOLDERS - seen]:
            if is_model(found):
                yield found
        seen += len(below)
        level = [found for found in below[:_MOST_FOLDERS] if not is_model(found)]


def _folders(parent: Path) -> list[Path]:
    try:
        with os.scandir(parent) as entries:
            return [Path(one.path) for one in entries if one.is_dir(follow_symlinks=False)]
    except OSError:
        return []
