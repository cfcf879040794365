"""Tells GGUF from safetensors by names alone, without importing a reader of either."""

from __future__ import annotations

from pathlib import Path


def is_gguf(path: str | Path) -> bool:
    """Whether a path is to be read as GGUF: a file, or a folder of .gguf without safetensors."""
    path = Path(path)
    if path.is_dir():
        return any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))
    return path.is_file() or path.suffix == ".gguf"
