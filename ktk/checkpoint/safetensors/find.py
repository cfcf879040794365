"""Finds out by the tables of families and storage how the experts of a layer are stored."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property

from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.nearest import nearest, some
from ktk.checkpoint.safetensors.families import Stored, families
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.locations import Locations
from ktk.checkpoint.safetensors.names import (
    LayerNames,
    depth_of,
    first_part,
    is_bias,
    weight_parts,
)
from ktk.checkpoint.safetensors.scheme import Header, Scheme, fits
from ktk.checkpoint.safetensors.storage import PLAIN, SCHEMES
from ktk.checkpoint.safetensors.tensors import layout_of, role_of
from ktk.checkpoint.spans import spans
from ktk.errors import CheckpointError

# By what the names of experts that cannot be read have: what helps.
_CURES = {
    "_scale_and_zero": "Tensors of torchao's Int4TilePackedTo4dTensor are laid out for one kind of "
    'GPU: save the model with int4_packing_format="plain"',
    "_qdata": "Of torchao's tensors ktk reads Int8Tensor, Float8Tensor and Int4Tensor "
    '(int4_packing_format="plain"): save the model as one of these',
    "zero_q": "HQQ's zero points are quantised themselves: save the model with quant_zero=False",
    "scale_q": "HQQ's scales are quantised themselves: save the model with quant_scale=False",
    "absmax": "Of bitsandbytes ktk reads experts with tensors of their own: save a model that "
    "has them as modules, or one without codes (model.dequantize())",
}


class Finder:
    """Looks for experts among the tensors of a checkpoint, in one of its modules if that is said.

    Attributes
    ----------
    locations
        Where the experts of each layer are.
    """

    def __init__(self, index: TensorIndex, config: ExpertConfig, module: str | None = None) -> None:
        self.index = index
        self.config = config
        self._module = module
        self._families = tuple(
            family
            for family in families(gated=config.gated)
            if not family.model_types or config.model_type in family.model_types
        )

    @cached_property
    def locations(self) -> Locations:
        """Where experts are; reads the names of all tensors."""
        firsts = (family.parts[first_part(family)] for family in self._families)
        names = {
            scheme.name_of("data", stored.stem, stored.fused)
            for stored in firsts
            for scheme in SCHEMES
            if _suits(scheme, stored)
        }
        known = frozenset(filter(None, names))
        return Locations(self.index.folder, self.index.names(), known, self._module)

    def numbers(self) -> list[int]:
        """Return the layers that have experts of a family ktk knows."""
        return self.locations.numbers()

    def find(self, number: int) -> LayerNames:
        """Return how the experts of a layer are stored, as far as the first of them shows it."""
        named = [layer for layer in self._candidates(number) if layer.first_name in self.index]
        if not named:
            raise CheckpointError(self.no_experts(number))
        # A row made for this model is the only one: another might fit by accident of sizes.
        own = [layer for layer in named if layer.family.model_types]
        candidates = own or named
        typed = [layer for layer in candidates if self._has_types(layer)]
        if not typed:
            raise CheckpointError(self._no_scheme(candidates))
        sized = [self._sized(layer) for layer in typed]
        found = next((layer for layer in sized if self._fits(layer)), sized[0])
        if found.scheme is not PLAIN and (refusal := self.config.quantization.refusal):
            raise CheckpointError(f"{self.index.where(found.first_name)} {refusal}")
        return self._with_biases(found)

    def _candidates(self, number: int) -> Iterator[LayerNames]:
        config = self.config.of_layer(number)
        location = self.locations.of_layer(number)
        if location is None:
            return
        for family in self._families:
            for scheme in SCHEMES:
                if all(_suits(scheme, family.parts[part]) for part in weight_parts(family)):
                    yield LayerNames(number, location, family, scheme, config)

    def _with_biases(self, layer: LayerNames) -> LayerNames:
        """Add the biases that the experts have."""
        biases = {
            f"{part}_bias": stored.bias(depth_of(part))
            for part, stored in layer.family.parts.items()
            if self._has_bias(layer, part, 1 if stored.fused else layer.config.num_experts)
        }
        family = replace(layer.family, parts={**layer.family.parts, **biases})
        return replace(layer, family=family)

    def _has_bias(self, layer: LayerNames, part: str, tensors: int) -> bool:
        """Whether a part has a bias; writers of codes leave zeros beside matrices without one."""
        names = (layer.bias_name(part, expert) for expert in range(tensors))
        return any(
            name in self.index and bool(self.index.tensor(name).float().any()) for name in names
        )

    def _has_types(self, layer: LayerNames) -> bool:
        """Whether the first matrix has all tensors of the scheme, with elements of its types."""
        part = layer.first
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, 0, role)
            if name not in self.index:
                if not piece.optional:
                    return False
            elif self.index.dtype(name) not in piece.dtypes:
                return False
        return True

    def _fits(self, layer: LayerNames) -> bool:
        return all(
            name in self.index and fits(self.index.shape(name), layer.shapes(part, role))
            for part in layer.family.parts
            for role in (layer.scheme.tensors if not is_bias(part) else ("data",))
            for name in [layer.name(part, 0, role)]
            if name in self.index or not self._optional(layer, part, role)
        )

    def _optional(self, layer: LayerNames, part: str, role: str) -> bool:
        return not is_bias(part) and layer.scheme.tensors[role].optional

    def _sized(self, layer: LayerNames) -> LayerNames:
        """Fill in the columns of a group and the bits of a code, as the first matrix has them."""
        headers = {}
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(layer.first, 0, role)
            if name in self.index:
                shape = self.index.shape(name)
                own = shape[1:] if layer.family.parts[layer.first].fused else shape
                headers[role_of(piece)] = Header(self.index.dtype(name), own)
        n, k = layer.extents(layer.first)
        layout = layout_of(layer.scheme, headers, n, k, self.config.quantization)
        return replace(layer, group=layout.group, bits=layout.bits)

    def _no_scheme(self, candidates: list[LayerNames]) -> str:
        """Say what is beside a tensor that no row of the table explains."""
        layer = candidates[0]
        first = layer.first_name
        stem = layer.stem(layer.first, 0)
        if first.endswith("_qdata"):  # torchao's names do not all begin with the matrix's
            stem = first.removesuffix("_qdata")
        beside = [
            f"{name} ({self.index.dtype(name)})"
            for name in sorted(self.index.names())
            if name.startswith(stem) and name != first
        ]
        method = self.config.quantization.method
        return (
            f"{self.index.where(first)} has elements of type {self.index.dtype(first)}, and ktk "
            f"knows no scheme that it is part of; beside it: {', '.join(beside) or 'nothing'}"
            + (f"; config.json says {method}" if method else "")
            + next(
                (f". {cure}" for role, cure in _CURES.items() if role in f"{first} {beside}"), ""
            )
        )

    def no_experts(self, number: int | None = None) -> str:
        """Say that a layer, or the model, has no experts that ktk finds, and what is there."""
        names = sorted(self.index.names())
        if any(map(_OF_KT_KERNEL.fullmatch, names)):
            return (
                f"{self.index.folder} was made by kt-kernel's converter for its own kernels: give "
                "the checkpoint that it was made from, as it is or after ktk convert"
            )
        message = f"{self.index.folder} has no experts that ktk knows by name"
        if self._module is not None:
            message = f"{message} in a module {self._module!r}"
        if number is not None:
            message = f"{message} in layer {number}"
            if layers := self.numbers():
                message = f"{message}; layers with experts: {spans(layers)}"
        near = nearest(names, number)
        return f"{message}; it has {some(near)}" if near else message


# What kt-kernel's convert_cpu_weights.py writes: bytes in the layout of a kernel and its shards.
_OF_KT_KERNEL = re.compile(r"blk\.\d+\.ffn_(?:up|gate|down)_exps\.\d+\.numa\.\d+\.\w+")


def _suits(scheme: Scheme, stored: Stored) -> bool:
    """Whether the scheme has names for tensors of this kind: shared by experts, or their own."""
    if stored.joined:
        return scheme is PLAIN
    return not stored.fused or all(part.fused is not None for part in scheme.tensors.values())
