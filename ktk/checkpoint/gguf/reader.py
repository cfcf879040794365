"""Reads the experts of GGUF files one at a time: as they are stored, or as floats."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.gguf.architectures import Metadata
from ktk.checkpoint.gguf.blocks import PLAIN, Blocks, row_nbytes, type_name
from ktk.checkpoint.gguf.layout import PARTS, GgufLayer, Layers
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.pieces import Piece, flat
from ktk.errors import CheckpointError, CheckpointFormatError

if TYPE_CHECKING:
    from ktk.backend import Backend


_F32 = Format("f32")


class GgufCheckpoint:
    """A model in one or more GGUF files, seen as layers of experts.

    Parameters
    ----------
    path
        A file, any file of a split model, or a folder that holds one model.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.tensors = TensorSet(self.path)
        self._scales: dict[str, np.ndarray] = {}
        self._layers = Layers(self.tensors, Metadata(self.path, self.tensors.fields))

    def __enter__(self) -> GgufCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.tensors.close()

    def files(self) -> list[Path]:
        """Return the files of the model."""
        return self.tensors.paths()

    def layers(self) -> list[int]:
        """Return the layers that have experts."""
        return self._layers.numbers()

    def config_of(self, layer: GgufLayer) -> ExpertConfig:
        """Return sizes and activation function of a layer."""
        return layer.config

    def layer(self, number: int) -> GgufLayer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        return self._layers.find(number)

    def blocks(self, layer: GgufLayer, number: int) -> dict[str, Blocks]:
        """Return gate, up and down of an expert as they are stored, to be read."""
        return {part: self._blocks(layer, part, number) for part in PARTS}

    def expert(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert as floats.

        Returns
        -------
        dict[str, Tensor]
            gate and up [I, H], down [H, I], and gate_bias, up_bias [I], down_bias [H] where the
            model has them: the arguments of `MoE.load_expert`. f32, f16 and bf16 are as the file
            has them, everything else is decoded to f32.
        """
        weights = {part: matrix.floats() for part, matrix in self.blocks(layer, number).items()}
        return weights | self._expert_biases(layer, number)

    def values(
        self, layer: GgufLayer, number: int, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """Read what one expert means, as floats: weights and biases."""
        return {name: tensor.to(dtype) for name, tensor in self.expert(layer, number).items()}

    def pieces(self, layer: GgufLayer, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        for part, place in layer.weights.items():
            yield self._piece(place.tensor(number), place.begin(number), place.count)
            if part in layer.biases:
                yield self._piece(layer.biases[part].name, number, 1)
        for name in layer.scales.values():
            whole = self._piece(name, 0, 1)
            yield replace(whole, data=whole.data[4 * number : 4 * number + 4])

    def _piece(self, name: str, begin: int, count: int) -> Piece:
        info = self.tensors.info(name)
        rows = self.tensors.rows(name, begin, count)
        return Piece(name, info.file, type_name(info).lower(), flat(rows))

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves: all were, when they were opened."""
        yield from ()

    def examine(self, number: int) -> tuple[GgufLayer | None, list[CheckpointError]]:
        """Do what `layer` does, but return the error, and None where there is no layer."""
        try:
            return self.layer(number), []
        except CheckpointError as error:
            return None, [error]

    def check_expert(self, layer: GgufLayer, number: int) -> None:
        """Do nothing: any bytes of a block are weights."""

    def has_floats(self, layer: GgufLayer) -> bool:
        """Whether the matrices are not quantised."""
        return all(
            matrix.plain
            for number in self._typed(layer)
            for matrix in self.blocks(layer, number).values()
        )

    def storage(self, layer: GgufLayer) -> tuple[str, str]:
        """Name the container, and the types of gate, up and down without repetition."""
        types = [matrix.type for matrix in self.blocks(layer, 0).values()]
        return "gguf", ", ".join(dict.fromkeys(types))

    def reader(self, layer: GgufLayer, backend: Backend) -> Callable[[int], dict[str, Any]]:
        """Return what reads an expert for `MoE.load_expert`: blocks where they are taken.

        Gate, up and down are each given as the file has them where the backend takes that;
        otherwise decoded to f32. So are floats that have a scale beside them, and a
        part whose type differs from expert to expert.

        Raises
        ------
        CheckpointFormatError
            The backend takes neither.
        """
        given = {part: one.format for part, one in self.formats_for(layer, backend).items()}
        return lambda number: self._arrays(layer, number, given)

    def formats(self, layer: GgufLayer) -> dict[str, Matrix]:
        """Return what gate, up and down are stored as, and what has to be decoded as f32.

        That are floats with a scale beside them, and a part whose type differs from expert to
        expert.
        """
        read = self._read_types(layer)
        return {part: Matrix(_stored(read[part]), *read[part][0].shape) for part in PARTS}

    def formats_for(self, layer: GgufLayer, backend: Backend) -> dict[str, Matrix]:
        """Return what `reader` gives a backend; raises what it raises."""
        read = self._read_types(layer)
        return {part: Matrix(_given(backend, read[part]), *read[part][0].shape) for part in PARTS}

    def _arrays(self, layer: GgufLayer, number: int, given: Mapping[str, Format]) -> dict[str, Any]:
        """Return the arguments of `MoE.load_expert`."""
        arrays: dict[str, Any] = {}
        for part, matrix in self.blocks(layer, number).items():
            scaled = matrix.scale is not None
            if matrix.format != given[part] or (matrix.plain and scaled):
                arrays[part] = matrix.floats().float()
                continue
            arrays[part] = matrix.array()
            if scaled:
                arrays[f"{part}_scale"] = np.array([matrix.scale], np.float32)
        formats = tuple(given[part] for part in PARTS)
        if any(fmt.element not in PLAIN for fmt in formats):
            arrays["given"] = formats if len(set(formats)) > 1 else formats[0]
        return {**arrays, **self._expert_biases(layer, number)}

    def nbytes(self, layer: GgufLayer) -> int:
        """Return the bytes of a layer's experts in the files."""
        experts = range(layer.config.num_experts)
        return sum(matrix.nbytes for e in experts for matrix in self.blocks(layer, e).values())

    def recorded_backend(self, layer: GgufLayer) -> None:
        """Say that the files were made for no backend in particular."""

    def release(self) -> None:
        """Close the files; reading goes on."""
        self.tensors.close()

    def _read_types(self, layer: GgufLayer) -> dict[str, list[Blocks]]:
        """Return matrices of each part that show all of its types."""
        read = [self.blocks(layer, number) for number in self._typed(layer)]
        return {part: [blocks[part] for blocks in read] for part in PARTS}

    def _typed(self, layer: GgufLayer) -> range:
        """Return the experts that show all types: one stands for those that share a tensor."""
        stacked = all(place.stacked for place in layer.weights.values())
        return range(1 if stacked else layer.config.num_experts)

    def _blocks(self, layer: GgufLayer, part: str, number: int) -> Blocks:
        place = layer.weights[part]
        name = place.tensor(number)
        return self._matrix(
            name, place.begin(number), place.count, self._scale(layer, part, number)
        )

    def _matrix(self, name: str, begin: int, count: int, scale: float | None = None) -> Blocks:
        """Return rows of a tensor, to be read."""
        info = self.tensors.info(name)
        read = functools.partial(self.tensors.rows, name, begin, count)
        return Blocks(read, (count, row_nbytes(info)), type_name(info), scale, str(info))

    def _scale(self, layer: GgufLayer, part: str, number: int) -> float | None:
        name = layer.scales.get(part)
        if name is None:
            return None
        if name not in self._scales:
            self._scales[name] = self.tensors.rows(name, 0, 1).view(np.float32)[0]
        return float(self._scales[name][number])

    def _expert_biases(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        found = {}
        for part, place in layer.biases.items():
            row = self._matrix(place.name, number, 1).floats()
            found[f"{part}_bias"] = row[0, place.first : place.first + place.count]
        return found


def _stored(matrices: list[Blocks]) -> Format:
    """Return the format of a part of all experts; f32 where there is no single one."""
    first = matrices[0]
    alike = all(matrix.format == first.format for matrix in matrices)
    scaled = any(matrix.scale is not None for matrix in matrices)
    return first.format if alike and not (first.plain and scaled) else _F32


def _given(backend: Backend, matrices: list[Blocks]) -> Format:
    """Return what to give a part of all experts as; `matrices` show all of its types."""
    first, stored = matrices[0], _stored(matrices)
    if first.plain or not Matrix(stored, *first.shape).refusal(backend):
        return _checked(backend, first, stored)
    return _checked(backend, first, _F32)


def _checked(backend: Backend, matrix: Blocks, fmt: Format) -> Format:
    """Return the format; raise if the backend does not take the matrix in it."""
    if reason := Matrix(fmt, *matrix.shape).refusal(backend):
        raise CheckpointFormatError(f"{matrix.name} has the type {matrix.type}: {reason}")
    return fmt
