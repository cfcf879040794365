"""Finds the tensors of a layer's experts in a GGUF file, and checks that they fit together.

Three layouts, the newest first; axes in the order of numpy:

    blk.L.ffn_gate_up_exps.weight   [E, 2I, H]  all rows of gate, then all rows of up
    blk.L.ffn_gate_exps.weight      [E, I, H]   and ffn_up_exps; ffn_down_exps [E, H, I] for both
    blk.L.ffn_gate.0.weight         [I, H]      a tensor per expert: the first Mixtral files

Experts without a gate have no ffn_gate_exps.

`.bias` in place of `.weight` is added to the product, [E, I] or [E, H]; `.scale`, [E], multiplies
it before that (gemma4, and what was quantised to NVFP4). Every tensor has its own type.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.gguf.architectures import Metadata
from ktk.checkpoint.gguf.blocks import type_name
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.checkpoint.nearest import nearest, some
from ktk.checkpoint.spans import spans
from ktk.config import PARTS
from ktk.errors import CheckpointError

_LAYER = re.compile(
    r"blk\.(\d{1,9})\.ffn_(?:(?:gate_up|gate|up|down)_exps|(?:gate|up|down)\.\d+)\.weight"
)
# Whatever belongs to experts: also the adjugate ones of GroveMoE, and scales of activations, which
# do not matter, since ktk encodes activations its own way.
_EXPERTS = r"blk\.{L}\.ffn_(?:(?:gate_up|gate|up|down)_(?:exps|chexps)|(?:gate|up|down)\.\d+)\..*"
_HARMLESS = ".input_scale"


@dataclass(frozen=True)
class Place:
    """Where a part of all experts is: rows [first, first + count) of each expert's `total`."""

    name: str
    first: int
    count: int
    total: int

    @property
    def stacked(self) -> bool:
        """Whether all experts share a tensor."""
        return "{e}" not in self.name

    def tensor(self, expert: int) -> str:
        """Return the name of the tensor that an expert is in."""
        return self.name.format(e=expert)

    def begin(self, expert: int) -> int:
        """Return the row of the tensor that an expert's part begins with."""
        return (expert * self.total if self.stacked else 0) + self.first


@dataclass(frozen=True)
class LayerPlaces:
    """Where gate, up and down of a layer, their biases and their scales are."""

    number: int
    config: ExpertConfig
    weights: Mapping[str, Place]
    biases: Mapping[str, Place]
    scales: Mapping[str, str]


class Layers:
    """The layers of a model that have experts."""

    def __init__(self, tensors: TensorSet, metadata: Metadata) -> None:
        self._tensors = tensors
        self._metadata = metadata

    def numbers(self) -> list[int]:
        """Return which layers have experts."""
        found = (_LAYER.fullmatch(name) for name in self._tensors.names())
        return sorted({int(match[1]) for match in found if match})

    def find(self, number: int) -> LayerPlaces:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        start = f"blk.{number}.ffn_"
        fused, single = f"{start}gate_up_exps.weight", f"{start}up.0.weight"
        parts = self._parts(start)
        if fused in self._tensors:
            size, hidden = self._rows(fused) // 2, self._hidden(f"{start}down_exps.weight")
            weights = {
                "gate": Place(fused, 0, size, 2 * size),
                "up": Place(fused, size, size, 2 * size),
                "down": Place(f"{start}down_exps.weight", 0, hidden, hidden),
            }
        elif any(f"{start}{part}_exps.weight" in self._tensors for part in PARTS):
            size, hidden = (
                self._rows(f"{start}up_exps.weight"),
                self._hidden(f"{start}down_exps.weight"),
            )
            weights = _separate(start + "{part}_exps.weight", parts, size, hidden)
        elif number in self.numbers():
            size, hidden = self._rows(single), self._hidden(f"{start}down.0.weight")
            weights = _separate(start + "{part}.{{e}}.weight", parts, size, hidden)
        else:
            raise CheckpointError(self.no_experts(number))
        count = self._count(weights["up"])
        if not weights["up"].stacked:
            self._check_surplus(weights, count)
        self._check_intermediate(number, weights["up"], size)
        for part, place in weights.items():
            depth = size if part == "down" else hidden
            if place.stacked:
                self._check(place.name, (count, place.total, depth))
            else:
                for expert in range(count):
                    self._check(place.tensor(expert), (place.total, depth))
        layer = LayerPlaces(
            number,
            self._metadata.config(number, count, hidden, size, gated="gate" in weights),
            weights,
            self._biases(weights, count),
            self._scales(weights, count),
        )
        self._check_all_is_read(layer)
        return layer

    def no_experts(self, number: int) -> str:
        """Say that a layer has no experts, which layers have some, and what comes nearest."""
        message = (
            f"{self._tensors.path} has no experts in layer {number}; layers with experts: "
            f"{spans(self.numbers()) or 'none'}"
        )
        near = nearest(sorted(self._tensors.names()), number)
        return f"{message}; it has {some(near)}" if near else message

    def _parts(self, start: str) -> Sequence[str]:
        """Return which matrices experts have; of an unknown architecture, those that are there."""
        if self._metadata.known:
            return PARTS[1:] if self._metadata.ungated else PARTS
        gates = (f"{start}gate_exps.weight", f"{start}gate.0.weight", f"{start}gate_up_exps.weight")
        return PARTS if any(name in self._tensors for name in gates) else PARTS[1:]

    def _hidden(self, down: str) -> int:
        """Return the width of what goes in, which is that of what comes out."""
        return self._metadata.hidden_size() or self._rows(down)

    def _count(self, up: Place) -> int:
        """Return how many experts there are."""
        if said := self._metadata.num_experts():
            return said
        if up.stacked:
            return self._tensors.info(up.name).shape[0]
        return next(e for e in itertools.count() if up.tensor(e) not in self._tensors)

    def _check_all_is_read(self, layer: LayerPlaces) -> None:
        """Refuse tensors of experts that are not read: the experts would be others."""
        places = [*layer.weights.values(), *layer.biases.values()]
        read = {place.tensor(e) for place in places for e in range(layer.config.num_experts)}
        pattern = re.compile(_EXPERTS.format(L=layer.number))
        for name in sorted(set(self._tensors.names()) - read - set(layer.scales.values())):
            if pattern.fullmatch(name) and not name.endswith(_HARMLESS):
                raise CheckpointError(
                    f"{self._tensors.info(name)} is none that ktk reads with experts such as "
                    f"{layer.weights['up'].tensor(0)}"
                )

    def _biases(self, weights: Mapping[str, Place], count: int) -> dict[str, Place]:
        found = {}
        for part, place in weights.items():
            name = place.name.removesuffix("weight") + "bias"
            if place.stacked and name in self._tensors:
                self._check(name, (count, place.total))
                found[part] = Place(name, place.first, place.count, place.total)
        return found

    def _scales(self, weights: Mapping[str, Place], count: int) -> dict[str, str]:
        found = {}
        for part, place in weights.items():
            name = place.name.removesuffix("weight") + "scale"
            if place.stacked and name in self._tensors:
                self._check(name, (count,))
                info = self._tensors.info(name)
                if type_name(info) != "F32":
                    raise CheckpointError(f"{info} has the type {type_name(info)}, expected F32")
                found[part] = name
        return found

    def _rows(self, name: str) -> int:
        info = self._tensors.info(name)
        if len(info.shape) < 2:
            raise CheckpointError(f"{info} has the shape {list(info.shape)}, expected a matrix")
        return info.shape[-2]

    def _check(self, name: str, expected: tuple[int, ...]) -> None:
        info = self._tensors.info(name)
        if info.shape != expected:
            raise CheckpointError(
                f"{info} has the shape {list(info.shape)}, but the metadata and the other tensors "
                f"mean {list(expected)}"
            )
        self._tensors.check(name)

    def _check_intermediate(self, number: int, up: Place, size: int) -> None:
        said = self._metadata.intermediate_size(number)
        if said is not None and said != size:
            raise CheckpointError(
                f"{self._tensors.info(up.tensor(0))} has {size} rows for up, but the metadata "
                f"says that experts are {said} wide"
            )

    def _check_surplus(self, weights: Mapping[str, Place], count: int) -> None:
        """Refuse more experts than the metadata says; too few are noticed one by one."""
        for place in weights.values():
            name = place.tensor(count)
            if name in self._tensors:
                raise CheckpointError(
                    f"{self._tensors.path} has the tensor {name}, but its metadata says that "
                    f"there are {count} experts"
                )


def _separate(pattern: str, parts: Sequence[str], size: int, hidden: int) -> dict[str, Place]:
    rows = {part: hidden if part == "down" else size for part in parts}
    return {part: Place(pattern.format(part=part), 0, count, count) for part, count in rows.items()}
