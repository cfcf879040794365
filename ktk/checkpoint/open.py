"""Opens a checkpoint of either kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.detect import check_path, is_gguf, is_packed
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.pieces import Piece
from ktk.checkpoint.safetensors.reader import Checkpoint
from ktk.errors import CheckpointError

if TYPE_CHECKING:
    from ktk.backend import Backend


class OpenCheckpoint(Protocol):
    """What safetensors folders and GGUF files have in common."""

    def __enter__(self) -> OpenCheckpoint: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def files(self) -> list[Path]:
        """Return the files that hold the tensors."""
        ...

    def layers(self) -> list[int]:
        """Return the layers that have experts."""
        ...

    def layer(self, number: int) -> Any:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        ...

    def config_of(self, layer: Any) -> ExpertConfig:
        """Return sizes and activation function of a layer."""
        ...

    def expert(self, layer: Any, number: int) -> dict[str, torch.Tensor]:
        """Read one expert as it is stored, or as floats."""
        ...

    def values(
        self, layer: Any, number: int, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """Read what one expert means, as floats: weights and biases."""
        ...

    def pieces(self, layer: Any, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        ...

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, without the weights, and yield what is wrong."""
        ...

    def examine(self, number: int) -> tuple[Any, list[CheckpointError]]:
        """Do what `layer` does, but return all errors, and None where there is no layer."""
        ...

    def check_expert(self, layer: Any, number: int) -> None:
        """Raise what reading an expert would, beyond what its tensors are one by one."""
        ...

    def has_floats(self, layer: Any) -> bool:
        """Whether the matrices are not quantised."""
        ...

    def storage(self, layer: Any) -> tuple[str, str]:
        """Name the naming scheme and the element type of the matrices."""
        ...

    def nbytes(self, layer: Any) -> int:
        """Return the bytes of a layer's experts in the files."""
        ...

    def formats(self, layer: Any) -> dict[str, Matrix]:
        """Return what gate, up and down are stored as."""
        ...

    def formats_for(self, layer: Any, backend: Backend) -> dict[str, Matrix]:
        """Return what `reader` gives a backend; raises what it raises."""
        ...

    def recorded_backend(self, layer: Any) -> str | None:
        """Name the backend that the files were made for; None for those of a hub."""
        ...

    def release(self) -> None:
        """Close the files; reading goes on."""
        ...

    def reader(self, layer: Any, backend: Backend) -> Callable[[int], dict[str, Any]]:
        """Return what reads an expert for `MoE.load_expert`.

        Raises
        ------
        CheckpointFormatError
            The backend does not take what is stored.
        """
        ...


def open_checkpoint(path: str | Path) -> OpenCheckpoint:
    """Open a folder of safetensors files, a GGUF file or a folder of them, or packed files.

    Raises
    ------
    CheckpointError
        There is no such thing under this path; the message says what to give instead.
    """
    check_path(path)
    if is_packed(path):
        from ktk.checkpoint.packed.reader import PackedCheckpoint

        return PackedCheckpoint(path)
    if is_gguf(path):
        from ktk.checkpoint.gguf import GgufCheckpoint

        return GgufCheckpoint(path)
    return Checkpoint(path)
