"""Tells GGUF, safetensors and packed files apart by names alone, without importing a reader."""

from __future__ import annotations

from pathlib import Path

# What `ktk convert` writes beside its files.
PACKED_INDEX = "ktk_packed.json"


def is_gguf(path: str | Path) -> bool:
    """Whether a path is to be read as GGUF: a file, or a folder of .gguf without safetensors."""
    path = Path(path)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.is_file() or path.suffix == ".gguf"


def is_packed(path: str | Path) -> bool:
    """Whether a folder was made by `ktk convert`."""
    return (Path(path) / PACKED_INDEX).is_file()
