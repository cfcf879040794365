"""Which tensors a packed file has, and where they are in it.

One file holds the experts of one layer, in the form in which a checkpoint would give what the
backend stores: codes row by row, with their scales and zero points. It depends neither on the
packed layout of an instruction set nor on threads, shards or NUMA nodes, and any reader of
safetensors understands it.

    | 8 bytes | JSON                         | tensors, without gaps, wide elements first       |
    | length  | __metadata__: ktk, ktk_xxh3  | down_scale gate_scale up_scale | down | gate | up |
                dtype, shape, place of each    [E, groups of n, groups of k]    [E, n, bytes of k]

Every tensor has a leading dimension of experts: an expert is one run of bytes in each of them.

Why not the packed layout, ready to be mapped: measured on a Zen 4 with the file in the page cache,
copying 311 MB of packed AMXINT4 weights into fresh memory ran at 4.4 GB/s, and packing them from
rows at 4.0 to 4.6 GB/s; of AMXINT8, 606 MB, at 4.5 and 5.9 to 7.3. First touch of memory is the
limit of either. Computing from the mapped file itself would save the copy, but its pages are small
and on whichever NUMA node read them first, and a packed matrix cannot be cut into other shards.

But where a backend's packed bytes are fewer than rows are, because of what is in them, and it can
tell them from other bytes (`is_packed` of abi.h), a file has those: uint8, one expert's after the
other's, as many of each as the header says. They are in the one layout of all variants of the
backend, so that any CPU that the backend runs on reads them; readers get rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.dtypes import NAMES, TORCH_DTYPES
from ktk.expert import Expert
from ktk.formats import FLOATS

ALIGNMENT = 64

_WIDE = {**{element: NAMES[element] for element in FLOATS}, "i8": "I8"}


@dataclass(frozen=True)
class Spec:
    """A tensor of the file: `dtype` as safetensors spells it, `shape` of one expert."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same in the words of torch."""
        return TORCH_DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one expert."""
        return prod(self.shape) * self.torch_dtype.itemsize

    def all_shape(self, experts: int) -> tuple[int, ...]:
        """Shape of the tensor of so many experts."""
        return (experts, *self.shape)

    def shape_of(self, expert: int) -> tuple[int, ...]:
        """Shape of what the tensor has of an expert."""
        return self.shape

    def place(self, expert: int) -> tuple[int, int]:
        """Where that begins in the tensor, and its bytes."""
        return expert * self.nbytes, self.nbytes


@dataclass(frozen=True)
class PackedSpec:
    """A tensor of packed bytes, one expert's after the other's.

    Attributes
    ----------
    layout
        Of the packed bytes, as the variants of the backend call it.
    sizes
        Bytes of each expert.
    """

    layout: str
    sizes: tuple[int, ...]
    dtype = "U8"
    torch_dtype = torch.uint8

    def all_shape(self, experts: int) -> tuple[int, ...]:
        """Shape of the tensor of all experts."""
        return (sum(self.sizes),)

    def shape_of(self, expert: int) -> tuple[int, ...]:
        """Shape of what the tensor has of an expert."""
        return (self.sizes[expert],)

    def place(self, expert: int) -> tuple[int, int]:
        """Where that begins in the tensor, and its bytes."""
        return sum(self.sizes[:expert]), self.sizes[expert]


@dataclass(frozen=True)
class Layout:
    """The tensors of the file of one layer.

    Attributes
    ----------
    config
        Sizes and activation function of the layer.
    formats
        Of gate, if there is one, up and down.
    biases
        Which of them have one.
    factors
        Which of them have one that multiplies the whole matrix, f32 [1]: ``gate_factor`` and so on;
        of ggml's blocks, ``gate_scale``.
    packed
        Which of gate, up and down are packed bytes.
    orders
        Which of them have their columns in an order, int32 [columns]: ``gate_order`` and so on, as
        `Matrix` has it.
    """

    config: ExpertConfig
    formats: Mapping[str, Format]
    biases: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    packed: Mapping[str, PackedSpec] = field(default_factory=dict)
    orders: tuple[str, ...] = ()

    @cached_property
    def specs(self) -> dict[str, Spec | PackedSpec]:
        """The tensors by name, in the order of the file."""
        found: dict[str, Spec | PackedSpec] = {}
        for part, fmt in self.formats.items():
            if part in self.packed:
                found[part] = self.packed[part]
            else:
                found |= _matrix(part, fmt, *extents(self.config, part))
            n, k = extents(self.config, part)
            if part in self.biases:
                found[f"{part}_bias"] = Spec("F32", (n,))
            if part in self.factors:
                found[f"{part}_{factor_name(fmt)}"] = Spec("F32", (1,))
            if part in self.orders:
                found[f"{part}_order"] = Spec("I32", (k,))
        # Wide elements first, so that each tensor begins at a multiple of its element.
        return dict(
            sorted(found.items(), key=lambda item: (-item[1].torch_dtype.itemsize, item[0]))
        )

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Where each tensor begins, counted from the first."""
        at, begins = 0, {}
        for name, spec in self.specs.items():
            begins[name] = at
            at += _nbytes(spec, self.config.num_experts)
        return begins

    def place(self, name: str, expert: int) -> tuple[int, int]:
        """Where an expert's part of a tensor begins, counted from the first tensor; its bytes."""
        begin, nbytes = self.specs[name].place(expert)
        return self.offsets[name] + begin, nbytes

    def tensors(self, number: int, expert: Expert) -> dict[str, torch.Tensor]:
        """Return what the file holds of an expert in these formats or packed, by name."""
        arrays = expert.arrays()
        return {
            name: arrays[name].reshape(spec.shape_of(number)) for name, spec in self.specs.items()
        }

    def expert(self, tensors: Mapping[str, torch.Tensor]) -> Expert:
        """Return the expert that the file holds in its tensors."""
        return Expert.of_arrays(tensors, self.formats)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(_nbytes(spec, self.config.num_experts) for spec in self.specs.values())


def factor_name(fmt: Format) -> str:
    """Return what a factor is called: where there are no scales, it stands for them."""
    return "scale" if fmt.scale == "none" else "factor"


def extents(config: ExpertConfig, part: str) -> tuple[int, int]:
    """Rows and columns of gate, up or down."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (hidden, inner) if part == "down" else (inner, hidden)


def _nbytes(spec: Spec | PackedSpec, experts: int) -> int:
    return prod(spec.all_shape(experts)) * spec.torch_dtype.itemsize


def _matrix(part: str, fmt: Format, n: int, k: int) -> dict[str, Spec]:
    columns, nbytes = fmt.block
    dtype = _WIDE.get(fmt.element, "U8")
    row = k // columns * nbytes // TORCH_DTYPES[dtype].itemsize
    found = {part: Spec(dtype, (n, row))}
    for what, element in (("scale", fmt.scale), ("zero", fmt.zero)):
        if element != "none":
            found[f"{part}_{what}"] = Spec(_WIDE.get(element, "U8"), fmt.groups(n, k))
    return found
