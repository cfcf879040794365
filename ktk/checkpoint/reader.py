"""What all readers of checkpoints are, and what they give for a layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.pieces import Piece
from ktk.closing import Closing
from ktk.errors import CheckpointError
from ktk.expert import Expert, Matrix
from ktk.formats import FLOATS
from ktk.quantize import dequantize


class Storage(NamedTuple):
    """How the experts of a layer are stored, for people.

    Attributes
    ----------
    family
        The naming scheme, or the container.
    dtype
        The element type or the format of the matrices, or all of them where they differ.
    """

    family: str
    dtype: str


class LayerReader(ABC):
    """The experts of one layer of a checkpoint.

    Attributes
    ----------
    number : int
        Of the layer in the model.
    config : ExpertConfig
        Sizes and activation function.
    recorded_backend : str or None
        Name of the backend that the files were made for; None for those of a hub.
    """

    number: int
    config: ExpertConfig
    recorded_backend: str | None = None

    @property
    @abstractmethod
    def formats(self) -> Mapping[str, MatrixInfo]:
        """What `expert` gives gate, up and down as: what all experts are stored as, or else f32."""

    @property
    def file_formats(self) -> Mapping[str, Format]:
        """The formats of gate, up and down in the files, before scales are repeated by row."""
        return {part: matrix.format for part, matrix in self.formats.items()}

    @property
    def decodes(self) -> bool:
        """Whether the files have codes of no format that ktk names, which are read as f32."""
        return False

    @property
    def decoded_because(self) -> str:
        """Why it `decodes`, where others that are stored alike need not: "whose groups ..."."""
        return ""

    @property
    def has_floats(self) -> bool:
        """Whether the matrices are not quantised."""
        return not self.decodes and all(
            matrix.format.element in FLOATS for matrix in self.formats.values()
        )

    @property
    def orders(self) -> tuple[str, ...]:
        """Those of gate, up and down whose columns are in an order, as `Matrix` has it.

        Of some experts at least; but of those that are read as f32.
        """
        return ()

    @property
    @abstractmethod
    def storage(self) -> Storage:
        """How the experts are stored, for people."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of all experts in the files."""

    def expert(self, number: int, decode: Collection[str] = ()) -> Expert:
        """Read one expert.

        Parameters
        ----------
        number
            Of the expert.
        decode
            Those of gate, up and down that are to be f32; the others are as `formats` says.

        Returns
        -------
        Expert
            Of contiguous tensors.

        Raises
        ------
        CheckpointError
            A tensor is damaged, or of a type that cannot be decoded.
        """
        matrices = self._read(number).matrices
        for part in decode:
            matrices[part] = decoded(matrices[part], self.where(part, number))
        return Expert(**matrices)

    def unread(self, number: int) -> Expert:
        """Read one expert as `expert` does; an `UnreadExpert` leaves the rest to who packs it."""
        return self.expert(number)

    def values(self, number: int, dtype: torch.dtype = torch.float64) -> Expert:
        """Read what one expert means, as floats: weights and biases."""
        matrices = self._read(number).matrices
        for part, matrix in matrices.items():
            one = decoded(matrix, self.where(part, number), dtype)
            bias = None if one.bias is None else one.bias.to(dtype)
            matrices[part] = replace(one, bias=bias)
        return Expert(**matrices)

    @abstractmethod
    def pieces(self, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""

    @abstractmethod
    def check_expert(self, number: int) -> None:
        """Raise what reading an expert would, beyond what its tensors are one by one."""

    @abstractmethod
    def where(self, part: str, expert: int = 0) -> str:
        """Name a matrix and its file, for messages."""

    def refused(self, part: str, backend: str, reason: str) -> str:
        """Say that a backend does not take a matrix as it is stored, and why."""
        return f"{self.where(part)}: {reason}"

    @abstractmethod
    def _read(self, number: int) -> Expert:
        """Read one expert as `formats` says."""


class CheckpointReader(Closing):
    """The files of a model, seen as layers of experts.

    Attributes
    ----------
    path : Path
        What was opened.
    """

    path: Path

    @abstractmethod
    def files(self) -> list[Path]:
        """Return the files that hold the experts, and those that describe them."""

    @abstractmethod
    def layers(self) -> list[int]:
        """Return the layers that have experts."""

    @abstractmethod
    def layer(self, number: int) -> LayerReader:
        """Find out how the experts of a layer are stored, and check that all of them are there."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; reading opens them again."""

    def tensor_sizes(self) -> dict[str, int]:
        """Return the bytes of all tensors by name, of what is no expert, too; none if unknown."""
        return {}

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, without the weights, and yield what is wrong."""
        yield from ()

    def examine(self, number: int) -> tuple[LayerReader | None, list[CheckpointError]]:
        """Do what `layer` does, but return all errors, and None where there is no layer."""
        try:
            return self.layer(number), []
        except CheckpointError as error:
            return None, [error]


def decoded(matrix: Matrix, where: str, dtype: torch.dtype = torch.float32) -> Matrix:
    """Return a matrix as floats; `where` names it in messages."""
    try:
        values = dequantize(matrix, dtype)
    except ValueError as error:
        raise CheckpointError(f"{where} {error}") from None
    return Matrix(Format("f32") if dtype == torch.float32 else None, values, bias=matrix.bias)
