"""Reads the experts of a layer of GGUF files, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from ktk._core import Format
from ktk.checkpoint.gguf.blocks import (
    as_blocks,
    format_of,
    has_blocks,
    row_nbytes,
    row_scale,
    type_name,
)
from ktk.checkpoint.gguf.header import TensorInfo
from ktk.checkpoint.gguf.layout import LayerPlaces
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.pieces import Piece, flat
from ktk.checkpoint.reader import LayerReader, Storage, decoded
from ktk.dtypes import FLOAT_DTYPES
from ktk.expert import Expert, Matrix
from ktk.unread import Unread, UnreadExpert

_F32 = Format("f32")


class GgufLayer(LayerReader):
    """The experts of one layer, in the places that were found for them.

    Every tensor has a type of its own: gate, up and down may differ, and where each expert has
    tensors of its own, so may experts. A part whose type differs from expert to expert is given as
    f32, and so are floats that have a scale beside them.
    """

    def __init__(self, tensors: TensorSet, places: LayerPlaces) -> None:
        self.number = places.number
        self.config = places.config
        self._places = places
        self._tensors = tensors

    @cached_property
    def formats(self) -> Mapping[str, MatrixInfo]:
        """What gate, up and down are stored as; f32 where that is no single format."""
        found = {}
        for part, place in self._places.weights.items():
            first, *others = [format_of(info) for info in self._typed(part)]
            scaled = first.element in FLOAT_DTYPES and part in self._places.scales
            alike = all(other == first for other in others)
            k = self._info(part, 0).shape[-1]
            found[part] = MatrixInfo(first if alike and not scaled else _F32, place.count, k)
        return found

    @property
    def has_floats(self) -> bool:
        """Whether the matrices are not quantised."""
        return all(
            format_of(info).element in FLOAT_DTYPES
            for part in self._places.weights
            for info in self._typed(part)
        )

    @property
    def storage(self) -> Storage:
        """The container, and the types of gate, up and down without repetition."""
        types = (type_name(self._info(part, 0)) for part in self._places.weights)
        return Storage("gguf", ", ".join(dict.fromkeys(types)))

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the files."""
        return sum(
            place.count * row_nbytes(self._info(part, expert))
            for part, place in self._places.weights.items()
            for expert in range(self.config.num_experts)
        )

    def pieces(self, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        for part, place in self._places.weights.items():
            yield from self._pieces(place.tensor(number), place.begin(number), place.count)
            if part in self._places.biases:
                yield from self._pieces(self._places.biases[part].name, number, 1)
        for name in self._places.scales.values():
            [whole] = self._pieces(name, 0, 1)
            yield replace(whole, data=whole.data[4 * number : 4 * number + 4])

    def check_expert(self, number: int) -> None:
        """Do nothing: any bytes of a block are weights."""

    def where(self, part: str, expert: int = 0) -> str:
        """Name a matrix and its file, for messages."""
        return str(self._info(part, expert))

    def refused(self, part: str, backend: str, reason: str) -> str:
        """Say that a backend does not take a matrix as it is stored, and why."""
        return f"{self.where(part)} has the type {type_name(self._info(part, 0))}: {reason}"

    def unread(self, number: int) -> UnreadExpert:
        """Read one expert but for blocks and floats that are stored as they are given."""
        later = Unread()
        return UnreadExpert.of(self._read(number, later), later)

    def _read(self, number: int, later: Unread | None = None) -> Expert:
        return Expert(**{part: self._matrix(part, number, later) for part in self._places.weights})

    def _matrix(self, part: str, number: int, later: Unread | None = None) -> Matrix:
        place = self._places.weights[part]
        name = place.tensor(number)
        info = self._tensors.info(name)
        fmt = format_of(info)
        scaled = fmt.element in FLOAT_DTYPES and part in self._scales
        if scaled or fmt != self.formats[part].format or not has_blocks(info):
            later = None
        rows = self._tensors.rows(name, place.begin(number), place.count, later)
        data = torch.from_numpy(as_blocks(info, rows))
        scale = self._scales[part][number : number + 1] if part in self._scales else None
        bias = self._bias(part, number)
        if fmt.element in FLOAT_DTYPES:
            data = data.view(FLOAT_DTYPES[fmt.element])
            if scale is not None:
                return Matrix(_F32, data.float() * scale, bias=bias)
        matrix = Matrix(fmt, data, scale, bias=bias)
        if fmt == self.formats[part].format:
            return matrix
        return decoded(matrix, self.where(part, number))

    def _bias(self, part: str, number: int) -> torch.Tensor | None:
        place = self._places.biases.get(part)
        if place is None:
            return None
        info = self._tensors.info(place.name)
        fmt = format_of(info)
        rows = torch.from_numpy(as_blocks(info, self._tensors.rows(place.name, number, 1)))
        if fmt.element in FLOAT_DTYPES:
            row = rows.view(FLOAT_DTYPES[fmt.element])
        else:
            row = decoded(Matrix(fmt, rows), str(info)).data
        return row[0, place.first : place.first + place.count]

    @cached_property
    def _scales(self) -> Mapping[str, torch.Tensor]:
        """What all values of an expert are to be multiplied with, in the few files that say so."""
        return {
            part: torch.from_numpy(self._tensors.rows(name, 0, 1).view(np.float32)[0])
            for part, name in self._places.scales.items()
        }

    def _pieces(self, name: str, begin: int, count: int) -> Iterator[Piece]:
        """Yield rows of a tensor; scales of whole rows are apart from their blocks."""
        info = self._tensors.info(name)
        rows = self._tensors.rows(name, begin, count)
        element, nbytes = row_scale(info)
        if nbytes:
            yield Piece(name, info.file, element, flat(rows[:, :nbytes]))
            yield Piece(name, info.file, "", flat(rows[:, nbytes:]))
        else:
            yield Piece(name, info.file, type_name(info).lower(), flat(rows))

    def _info(self, part: str, expert: int) -> TensorInfo:
        return self._tensors.info(self._places.weights[part].tensor(expert))

    def _typed(self, part: str) -> list[TensorInfo]:
        """Return tensors that show all types of a part: one where experts share it."""
        stacked = self._places.weights[part].stacked
        return [self._info(part, e) for e in range(1 if stacked else self.config.num_experts)]
