"""What a row of the table of `storage` is: the tensors of a matrix, and what they mean.

Shapes are written in the sizes of the matrix as it is multiplied: N output columns, K depth, and

    G      columns of a group, from config.json or the shape of the scales
    B, C   rows and columns of a block, from config.json
    b      bits of a code, from config.json or the shape of the codes
    Z      words of zero points in a row, of AWQ for products with a vector
    N*b/32 a product, or its quotient, rounded up
    *      any extent
    |      or

Tensors that several experts share have an axis of experts before these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ktk._core import Format
from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.tensor_file import dtype_name
from ktk.expert import Matrix

Tensors = Mapping[str, torch.Tensor]
#: Stands for any extent.
ANY = -1
#: What matrices are decoded to that no `Format` is.
FLOAT = Format("f32")


class StorageError(ValueError):
    """What a matrix's tensors hold cannot be read; the message lacks their name."""


class Header(NamedTuple):
    """What is known of a tensor without its values; `dtype` as safetensors spells it."""

    dtype: str
    shape: tuple[int, ...]


class Told(NamedTuple):
    """What a matrix is read as; of FLOAT, why: "whose groups do not divide rows"."""

    format: Format
    why: str = ""


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Attributes
    ----------
    suffix
        What follows the matrix's name where each expert has tensors of its own.
    shape
        Alternatives, in the language above.
    dtypes
        Element types, as safetensors spells them.
    fused
        What follows the matrix's name where experts share a tensor, or stands in the place of its
        last word, {}; None: they never do.
    optional
        Whether it may be missing.
    shared
        Whether one may do for all experts that share the others.
    """

    suffix: str
    shape: str
    dtypes: tuple[str, ...]
    fused: str | None = None
    optional: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Layout:
    """The sizes that shapes are written in."""

    n: int
    k: int
    group: int
    quantization: Quantization
    bits: int = 4

    def shapes(self, part: Part) -> list[tuple[int, ...]]:
        """Return what a tensor's shape may be, as `fits` takes it."""
        sizes = {"N": self.n, "K": self.k, "G": self.group or self.k, "b": self.bits}
        sizes |= dict(zip("BC", self.quantization.block, strict=True))
        # Padded so that small groups have whole words for 128 columns.
        words, whole = math.ceil(self.k / sizes["G"] / 8), max(128 // sizes["G"], 1)
        sizes["Z"] = math.ceil(words / whole) * whole

        def size(word: str) -> int:
            if word == "*":
                return ANY
            product, _, divisor = word.partition("/")
            extents = (sizes[one] if one in sizes else int(one) for one in product.split("*"))
            return -(-math.prod(extents) // (sizes.get(divisor) or int(divisor or 1)))

        return [tuple(map(size, words.split())) for words in part.shape.split("|")]


def fits(shape: tuple[int, ...], expected: list[tuple[int, ...]]) -> bool:
    """Whether a shape is one of those expected."""
    return any(
        len(shape) == len(one)
        and all(wanted in (extent, ANY) for extent, wanted in zip(shape, one, strict=True))
        for one in expected
    )


Tell = Callable[[Mapping[str, Header], Layout, Callable[[str], torch.Tensor]], Told]


@dataclass(frozen=True)
class Scheme:
    """A row of the table.

    Attributes
    ----------
    name
        For messages.
    found
        Whose files are so, in docs/checkpoints.md.
    tensors
        The elements as ``data``, and what else belongs to them.
    decode
        Makes a matrix of them.
    decoded_if
        Tensors whose values may leave the matrix without a `Format`, so that it becomes f32; and
        what finds that out.
    sizes
        Tensors whose values say how many rows and columns there are, where no shape does, or none
        for sure; and what reads that of them.
    tell
        Where neither config.json nor the first matrix speaks for all: says what each is read as,
        by the headers of its tensors, and by what it reads of them, by role.
    """

    name: str
    found: str
    tensors: Mapping[str, Part]
    decode: Callable[[Tensors, Layout], Matrix]
    decoded_if: Mapping[str, Callable[[torch.Tensor, Layout], bool]] = field(default_factory=dict)
    sizes: Mapping[str, Callable[[torch.Tensor], tuple[int, ...]]] = field(default_factory=dict)
    tell: Tell | None = None

    def name_of(self, role: str, stem: str, fused: bool) -> str | None:
        """Return the full name of a tensor; None where shared tensors have none."""
        part = self.tensors[role]
        suffix = part.fused if fused else part.suffix
        if suffix is None or "{}" not in suffix:
            return None if suffix is None else stem + suffix
        module, dot, name = stem.rpartition(".")
        return module + dot + suffix.format(name)


def decoded(layout: Layout, data: torch.Tensor, values: Callable[[], torch.Tensor]) -> Matrix:
    """Return a matrix of f32, of a format that no `Format` is.

    Where `data` is a stand-in on the device meta, so are the values, and nothing is computed.
    """
    if data.is_meta:
        return Matrix(FLOAT, torch.empty(layout.n, layout.k, device="meta", dtype=torch.float32))
    return Matrix(FLOAT, values())


def rows_and_columns(shape: torch.Tensor) -> tuple[int, ...]:
    """Return rows and columns of a matrix, by the tensor that holds them.

    Raises
    ------
    StorageError
        It holds something else.
    """
    extents = tuple(shape.flatten().tolist())
    if len(extents) != 2 or min(extents) < 1:
        raise StorageError(f"is {list(extents)}, which are no rows and columns")
    return extents


def header_of(tensor: torch.Tensor) -> Header:
    """Return what a file says of a tensor ahead of its values."""
    return Header(dtype_name(tensor.dtype), tuple(tensor.shape))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor whose last axis is contiguous."""
    return tensor.view(torch.uint8)
