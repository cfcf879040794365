"""What ggml's types mean: bytes of a row, the format in ktk's words, and their values as floats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ktk._core import Format
from ktk.checkpoint.gguf.header import TensorInfo
from ktk.errors import CheckpointError

# Types whose elements are values already.
_FLOATS = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
#: Their names in ktk.
PLAIN = tuple(kind.name.lower() for kind in _FLOATS)
# Rows that are decoded at a time: gguf holds their values twice.
_ROWS = 64


@dataclass(frozen=True)
class Blocks:
    """A matrix as the file has it.

    Attributes
    ----------
    read
        Returns its rows, uint8 `stored`.
    stored
        Rows, and bytes of a row.
    type
        Name of the ggml type: Q4_K, BF16, ...
    scale
        What all values are to be multiplied with, in the few files that have one.
    name
        The tensor and its file, for messages.
    """

    read: Callable[[], np.ndarray]
    stored: tuple[int, int]
    type: str
    scale: float | None
    name: str

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        block, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        n, row_nbytes = self.stored
        return n, row_nbytes // nbytes * block

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix in the file."""
        n, row_nbytes = self.stored
        return n * row_nbytes

    @property
    def plain(self) -> bool:
        """Whether the elements are floats."""
        return GGMLQuantizationType[self.type] in _FLOATS

    @property
    def format(self) -> Format:
        """The format to give it to a backend in."""
        number = GGMLQuantizationType[self.type]
        return Format(self.type.lower() if self.plain else f"ggml:{number.value}")

    def array(self) -> torch.Tensor | np.ndarray:
        """Read what a backend takes in this format."""
        return self._plain() if self.plain else self.read()

    def floats(self) -> torch.Tensor:
        """Read the values [n, k]: as they are where the file has floats, otherwise f32."""
        values = self._plain() if self.plain else self._decoded()
        return values if self.scale is None else values.float() * self.scale

    def _plain(self) -> torch.Tensor:
        return torch.from_numpy(self.read()).view(_FLOATS[GGMLQuantizationType[self.type]])

    def _decoded(self) -> torch.Tensor:
        kind = GGMLQuantizationType[self.type]
        rows = self.read()
        values = np.empty(self.shape, np.float32)
        try:
            with np.errstate(all="ignore"):
                for row in range(0, len(values), _ROWS):
                    values[row : row + _ROWS] = dequantize(rows[row : row + _ROWS], kind)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.name} has the type {self.type}, which gguf {version('gguf')} cannot decode"
            ) from None
        return torch.from_numpy(values)


@functools.cache
def _known(number: int) -> GGMLQuantizationType | None:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return None
    return kind if kind in GGML_QUANT_SIZES else None


def type_name(info: TensorInfo) -> str:
    """Return the name of a tensor's type."""
    return _type(info).name


def is_known(info: TensorInfo) -> bool:
    """Whether a tensor has a type that gguf knows, and whole blocks of it."""
    kind = _known(info.type)
    return kind is not None and bool(info.shape) and info.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0


def row_nbytes(info: TensorInfo) -> int:
    """Return the bytes of a row."""
    kind = _type(info)
    block, nbytes = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block:
        raise CheckpointError(
            f"{info} has the shape {list(info.shape)}, whose rows are not whole blocks of "
            f"{kind.name} ({block} elements)"
        )
    return info.shape[-1] // block * nbytes


def _type(info: TensorInfo) -> GGMLQuantizationType:
    kind = _known(info.type)
    if kind is None:
        raise CheckpointError(
            f"{info} has ggml type {info.type}, which gguf {version('gguf')} does not know"
        )
    return kind
