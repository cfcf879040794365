"""Opens a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from ktk.checkpoint.detect import check_path, is_gguf, is_packed
from ktk.checkpoint.reader import CheckpointReader


def open_checkpoint(path: str | Path) -> CheckpointReader:
    """Open a folder of safetensors files, a GGUF file or a folder of them, or packed files.

    Raises
    ------
    CheckpointError
        There is no such thing under this path; the message says what to give instead.
    """
    check_path(path)
    if is_packed(path):
        from ktk.checkpoint.packed import PackedCheckpoint

        return PackedCheckpoint(path)
    if is_gguf(path):
        from ktk.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    from ktk.checkpoint.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path)
