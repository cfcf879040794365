"""What a checkpoint's folder holds beside weights: tokenizer, generation config, code, licence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktk.checkpoint.detect import PACKED_INDEX
from ktk.conversion.compressed.state import STATE
from ktk.errors import CheckpointError

# Weights, of this conversion's source or in other forms.
_WEIGHTS = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".index.json",
)
# Are written anew, or describe weights that are not copied.
_OWN = (
    "config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    # Of the conversion that made the source.
    STATE,
    PACKED_INDEX,
)


def other_files(source: Path, output: Path) -> Iterator[Path]:
    """Yield the files to be copied, relative to the folder; hidden ones and weights are left out.

    Parameters
    ----------
    source
        The folder.
    output
        A folder that may lie in it, and is left out.

    Raises
    ------
    CheckpointError
        A link leads nowhere, as where a download ended early.
    """
    inside = output.resolve()
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if hidden or str(relative) in _OWN or path.name.endswith(_WEIGHTS):
            continue
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path} is missing, though a link leads to it: download the checkpoint again"
            )
        if path.is_file() and inside not in path.resolve().parents:
            yield relative
