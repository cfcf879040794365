"""Opens a checkpoint of any kind."""

from __future__ import annotations

from pathlib import Path

from ktk.checkpoint.detect import check_path, is_gguf, is_packed
from ktk.checkpoint.reader import CheckpointReader
from ktk.config import ACTIVATIONS, activation_called
from ktk.errors import CheckpointError


def open_checkpoint(
    path: str | Path,
    *,
    module: str | None = None,
    activation: str | None = None,
    top_k: int | None = None,
) -> CheckpointReader:
    """Open a folder of safetensors files, a GGUF file or a folder of them, or packed files.

    Parameters
    ----------
    path
        Of the checkpoint.
    module
        Of safetensors files: the module that has the experts, where several parts of a model have
        some. By default those of the language model.
    activation
        The activation function, where it is not what the files say, or ktk does not know it: of a
        GGUF file whose architecture is new. As `MoEConfig` or config.json calls it. What the files
        say of another function, its limits and softcaps, then does not hold.
    top_k
        Of GGUF files, experts that a token goes to, where the metadata does not say it.

    Raises
    ------
    CheckpointError
        There is no such thing under this path, or an argument is for other files; the message says
        what to give instead.
    """
    check_path(path)
    if activation is not None and activation_called(activation) is None:
        raise CheckpointError(
            f"activation (--activation) must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    if module is not None and (is_packed(path) or is_gguf(path)):
        raise CheckpointError(
            f"{path} has the experts of one module: module= is for folders of safetensors files"
        )
    if is_packed(path) and (activation is not None or top_k is not None):
        raise CheckpointError(
            f"{path} is packed: its activation function and top-k were said when it was converted"
        )
    if top_k is not None and not is_gguf(path):
        raise CheckpointError(
            f"{path} has a config.json, which says how many experts a token goes to: top_k= "
            "(--top-k) is for GGUF files"
        )
    if is_packed(path):
        from ktk.checkpoint.packed import PackedCheckpoint

        return PackedCheckpoint(path)
    if is_gguf(path):
        from ktk.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path, activation, top_k)
    from ktk.checkpoint.safetensors import SafetensorsCheckpoint

    return SafetensorsCheckpoint(path, module, activation)
