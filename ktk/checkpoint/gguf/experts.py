"""Reads the experts of GGUF files one at a time: as they are stored, or as floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.gguf.architectures import Metadata
from ktk.checkpoint.gguf.blocks import Blocks, type_name
from ktk.checkpoint.gguf.layout import PARTS, GgufLayer, Layers
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.checkpoint.matrix import Matrix
from ktk.errors import CheckpointFormatError

if TYPE_CHECKING:
    from ktk.backend import Backend


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
        """Return gate, up and down of an expert as they are stored: views of the mapped file."""
        return {part: self._blocks(layer, part, number) for part in PARTS}

    def expert(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert as floats.

        Returns
        -------
        dict[str, Tensor]
            gate and up [I, H], down [H, I], and gate_bias, up_bias [I], down_bias [H] where the
            model has them: the arguments of `MoE.load_expert`. f32, f16 and bf16 are views of the
            mapped file, everything else is decoded to f32.
        """
        weights = {part: matrix.floats() for part, matrix in self.blocks(layer, number).items()}
        return weights | self._expert_biases(layer, number)

    def values(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        """Read what one expert means, in float64: weights and biases."""
        return {name: tensor.double() for name, tensor in self.expert(layer, number).items()}

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

        With blocks comes `given`, the one format of gate, up and down. Where they differ, or one of
        them is not taken, all three are floats.

        Raises
        ------
        CheckpointFormatError
            The backend takes neither.
        """
        given = self.formats_for(layer, backend)["gate"].format
        if self._taken(layer, backend):
            return lambda number: {**self._stored(layer, number), "given": given}
        return lambda number: dict(self.expert(layer, number))

    def formats(self, layer: GgufLayer) -> dict[str, Matrix]:
        """Return what gate, up and down are stored as; what has to be multiplied is f32."""
        return {part: _stored_as(matrix) for part, matrix in self.blocks(layer, 0).items()}

    def formats_for(self, layer: GgufLayer, backend: Backend) -> dict[str, Matrix]:
        """Return what `reader` gives a backend: what is stored, or floats."""
        if self._taken(layer, backend):
            return self.formats(layer)
        formats: dict[str, Matrix] = {}
        for blocks in map(partial(self.blocks, layer), self._typed(layer)):
            formats = {part: _decoded_as(matrix) for part, matrix in blocks.items()}
            for part, matrix in formats.items():
                if reason := matrix.refusal(backend):
                    raise CheckpointFormatError(
                        f"{blocks[part].name} has the type {blocks[part].type}: {reason}"
                    )
        return formats

    def nbytes(self, layer: GgufLayer) -> int:
        """Return the bytes of a layer's experts in the files."""
        experts = range(layer.config.num_experts)
        return sum(matrix.rows.nbytes for e in experts for matrix in self.blocks(layer, e).values())

    def release(self) -> None:
        """Let go of what was read, so that it takes no memory."""
        self.tensors.release()

    def _taken(self, layer: GgufLayer, backend: Backend) -> bool:
        """Whether a backend takes the blocks of all experts, in one format."""
        given = self.formats(layer)["gate"].format
        return not self.has_floats(layer) and all(
            matrix.format == given and matrix.scale is None and not stored.refusal(backend)
            for number in self._typed(layer)
            for matrix in self.blocks(layer, number).values()
            for stored in [_stored_as(matrix)]
        )

    def _typed(self, layer: GgufLayer) -> range:
        """Return the experts that show all types: one stands for those that share a tensor."""
        stacked = all(place.stacked for place in layer.weights.values())
        return range(1 if stacked else layer.config.num_experts)

    def _stored(self, layer: GgufLayer, number: int) -> dict[str, Any]:
        arrays = {part: matrix.array() for part, matrix in self.blocks(layer, number).items()}
        return {**arrays, **self._expert_biases(layer, number)}

    def _blocks(self, layer: GgufLayer, part: str, number: int) -> Blocks:
        place = layer.weights[part]
        name = place.tensor(number)
        info = self.tensors.info(name)
        rows = self.tensors.rows(name, place.begin(number), place.count)
        return Blocks(rows, type_name(info), self._scale(layer, part, number), str(info))

    def _scale(self, layer: GgufLayer, part: str, number: int) -> float | None:
        name = layer.scales.get(part)
        if name is None:
            return None
        return float(self.tensors.rows(name, 0, 1).view(np.float32)[0, number])

    def _expert_biases(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        found = {}
        for part, place in layer.biases.items():
            info = self.tensors.info(place.name)
            row = Blocks(self.tensors.rows(place.name, number, 1), type_name(info), None, str(info))
            found[f"{part}_bias"] = row.floats()[0, place.first : place.first + place.count]
        return found


def _stored_as(matrix: Blocks) -> Matrix:
    return Matrix(matrix.format if matrix.scale is None else Format("f32"), *matrix.shape)


def _decoded_as(matrix: Blocks) -> Matrix:
    plain = matrix.plain and matrix.scale is None
    return Matrix(matrix.format if plain else Format("f32"), *matrix.shape)
