"""Finds a layer's experts in a GGUF file and reads them one at a time.

Three layouts, the newest first; axes in the order of numpy:

    blk.L.ffn_gate_up_exps.weight   [E, 2I, H]  all rows of gate, then all rows of up
    blk.L.ffn_gate_exps.weight      [E, I, H]   and ffn_up_exps; ffn_down_exps [E, H, I] for both
    blk.L.ffn_gate.0.weight         [I, H]      a tensor per expert: the first Mixtral files

`.bias` in place of `.weight` is added to the product, [E, I] or [E, H]; `.scale`, [E], multiplies
it before that (gemma4, and what was quantised to NVFP4). Every tensor has its own type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.experts import spans
from ktk.checkpoint.gguf.architectures import Metadata
from ktk.checkpoint.gguf.blocks import Blocks, type_name
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.errors import CheckpointError, CheckpointFormatError

if TYPE_CHECKING:
    from ktk.backend import Backend

_PARTS = ("gate", "up", "down")
_LAYER = re.compile(
    r"blk\.(\d+)\.ffn_(?:(?:gate_up|gate|up|down)_exps|(?:gate|up|down)\.\d+)\.weight"
)


@dataclass(frozen=True)
class _Place:
    """Where a part of all experts is: rows [first, first + count) of each expert's `total`."""

    name: str
    first: int
    count: int
    total: int

    @property
    def stacked(self) -> bool:
        return "{e}" not in self.name

    def tensor(self, expert: int) -> str:
        return self.name.format(e=expert)

    def begin(self, expert: int) -> int:
        return (expert * self.total if self.stacked else 0) + self.first


@dataclass(frozen=True)
class GgufLayer:
    """The experts of one layer: where gate, up, down, their biases and their scales are."""

    number: int
    config: ExpertConfig
    weights: Mapping[str, _Place]
    biases: Mapping[str, _Place]
    scales: Mapping[str, str]


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
        self.metadata = Metadata(self.path, self.tensors.fields)

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
        found = (_LAYER.fullmatch(name) for name in self.tensors.names())
        return sorted({int(match[1]) for match in found if match})

    def config_of(self, layer: GgufLayer) -> ExpertConfig:
        """Return sizes and activation function of a layer."""
        return layer.config

    def layer(self, number: int) -> GgufLayer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        start = f"blk.{number}.ffn_"
        count, hidden = self.metadata.num_experts, self.metadata.hidden_size
        fused, single = f"{start}gate_up_exps", f"{start}gate.0.weight"
        if f"{fused}.weight" in self.tensors:
            size = self._rows(f"{fused}.weight") // 2
            weights = {
                "gate": _Place(f"{fused}.weight", 0, size, 2 * size),
                "up": _Place(f"{fused}.weight", size, size, 2 * size),
                "down": _Place(f"{start}down_exps.weight", 0, hidden, hidden),
            }
        elif any(f"{start}{part}_exps.weight" in self.tensors for part in _PARTS):
            size = self._rows(f"{start}gate_exps.weight")
            weights = _separate(start + "{part}_exps.weight", size, hidden)
        elif number in self.layers():
            size = self._rows(single)
            weights = _separate(start + "{part}.{{e}}.weight", size, hidden)
            self._check_surplus(weights)
        else:
            raise CheckpointError(
                f"{self.path} has no experts in layer {number}; "
                f"layers with experts: {spans(self.layers()) or 'none'}"
            )
        self._check_intermediate(number, weights["gate"], size)
        for part, place in weights.items():
            depth = size if part == "down" else hidden
            if place.stacked:
                self._check(place.name, (count, place.total, depth))
            else:
                for expert in range(count):
                    self._check(place.tensor(expert), (place.total, depth))
        return GgufLayer(
            number,
            self.metadata.config(number, size),
            weights,
            self._biases(weights, count),
            self._scales(weights, count),
        )

    def blocks(self, layer: GgufLayer, number: int) -> dict[str, Blocks]:
        """Return gate, up and down of an expert as they are stored: views of the mapped file."""
        return {part: self._blocks(layer, part, number) for part in _PARTS}

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
        return all(matrix.plain for matrix in self.blocks(layer, 0).values())

    def storage(self, layer: GgufLayer) -> tuple[str, str]:
        """Name the container, and the types of gate, up and down without repetition."""
        types = [matrix.type for matrix in self.blocks(layer, 0).values()]
        return "gguf", ", ".join(dict.fromkeys(types))

    def reader(self, layer: GgufLayer, backend: Backend) -> Callable[[int], dict[str, Any]]:
        """Return what reads an expert for `MoE.load_expert`: blocks where they are taken.

        With blocks comes `given`: the format of gate, up and down, or a dict of theirs where they
        differ. Where one of them is not taken, all three are floats.

        Raises
        ------
        CheckpointFormatError
            The backend takes neither.
        """
        blocks = self.blocks(layer, 0)
        formats = {part: matrix.format for part, matrix in blocks.items()}
        refused = [_refusal(backend, matrix, formats[part]) for part, matrix in blocks.items()]
        if not layer.scales and not self.has_floats(layer) and not any(refused):
            alike = len({fmt.element for fmt in formats.values()}) == 1
            given = formats["gate"] if alike else formats
            return lambda number: {**self._stored(layer, number), "given": given}
        for part, matrix in blocks.items():
            fmt = formats[part] if matrix.plain and not layer.scales else Format("f32")
            if reason := _refusal(backend, matrix, fmt):
                raise CheckpointFormatError(f"{matrix.name} has the type {matrix.type}: {reason}")
        return lambda number: dict(self.expert(layer, number))

    def _stored(self, layer: GgufLayer, number: int) -> dict[str, Any]:
        arrays = {part: matrix.array() for part, matrix in self.blocks(layer, number).items()}
        return {**arrays, **self._expert_biases(layer, number)}

    def _blocks(self, layer: GgufLayer, part: str, number: int) -> Blocks:
        place = layer.weights[part]
        name = place.tensor(number)
        info = self.tensors.info(name)
        rows = self.tensors.rows(name, place.begin(number), place.count)
        return Blocks(rows, type_name(info), self._scale(layer, part, number), str(info))

    def _scale(self, layer: GgufLayer, part: str, number: int) -> float:
        name = layer.scales.get(part)
        if name is None:
            return 1.0
        return float(self.tensors.rows(name, 0, 1).view(np.float32)[0, number])

    def _expert_biases(self, layer: GgufLayer, number: int) -> dict[str, torch.Tensor]:
        found = {}
        for part, place in layer.biases.items():
            info = self.tensors.info(place.name)
            row = Blocks(self.tensors.rows(place.name, number, 1), type_name(info), 1.0, str(info))
            found[f"{part}_bias"] = row.floats()[0, place.first : place.first + place.count]
        return found

    def _biases(self, weights: Mapping[str, _Place], count: int) -> dict[str, _Place]:
        found = {}
        for part, place in weights.items():
            name = place.name.removesuffix("weight") + "bias"
            if place.stacked and name in self.tensors:
                self._check(name, (count, place.total))
                found[part] = _Place(name, place.first, place.count, place.total)
        return found

    def _scales(self, weights: Mapping[str, _Place], count: int) -> dict[str, str]:
        found = {}
        for part, place in weights.items():
            name = place.name.removesuffix("weight") + "scale"
            if place.stacked and name in self.tensors:
                self._check(name, (count,))
                info = self.tensors.info(name)
                if type_name(info) != "F32":
                    raise CheckpointError(f"{info} has the type {type_name(info)}, expected F32")
                found[part] = name
        return found

    def _rows(self, name: str) -> int:
        info = self.tensors.info(name)
        if len(info.shape) < 2:
            raise CheckpointError(f"{info} has the shape {list(info.shape)}, expected a matrix")
        return info.shape[-2]

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        info = self.tensors.info(name)
        if info.shape != expected:
            raise CheckpointError(
                f"{info} has the shape {list(info.shape)}, but the metadata and the other tensors "
                f"mean {list(expected)}"
            )
        self.tensors.check(name)

    def _check_intermediate(self, number: int, gate: _Place, size: int) -> None:
        said = self.metadata.intermediate_size(number)
        if said is not None and said != size:
            raise CheckpointError(
                f"{self.tensors.info(gate.tensor(0))} has {size} rows for gate, but the metadata "
                f"says that experts are {said} wide"
            )

    def _check_surplus(self, weights: Mapping[str, _Place]) -> None:
        """Refuse more experts than the metadata says; too few are noticed one by one."""
        for place in weights.values():
            name = place.tensor(self.metadata.num_experts)
            if name in self.tensors:
                raise CheckpointError(
                    f"{self.path} has the tensor {name}, but its metadata says that there are "
                    f"{self.metadata.num_experts} experts"
                )


def _separate(pattern: str, size: int, hidden: int) -> dict[str, _Place]:
    rows = {"gate": size, "up": size, "down": hidden}
    return {
        part: _Place(pattern.format(part=part), 0, count, count) for part, count in rows.items()
    }


def _refusal(backend: Backend, matrix: Blocks, fmt: Format) -> str:
    """Return why a backend does not take a matrix in a format; empty if it does."""
    try:
        backend.core.stored_as(fmt, *matrix.shape)
    except ValueError as error:
        return str(error)
    return ""
