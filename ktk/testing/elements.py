"""The elements of ``ktk/abi.h``, and what a format made of them divides a matrix into.

A format is anything with the attributes of ``ktk._core.Format``: ``element``, ``scale``, ``zero``
(names such as "bf16"), ``group_n`` and ``group_k``.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import numpy as np

from ktk.ggml import block
from ktk.testing import bounds, ggml
from ktk.testing.bounds import Array


class Format(Protocol):
    """The attributes of ``ktk._core.Format`` that the kit reads."""

    @property
    def element(self) -> str: ...
    @property
    def scale(self) -> str: ...
    @property
    def zero(self) -> str: ...
    @property
    def group_n(self) -> int: ...
    @property
    def group_k(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class Float:
    """A binary floating-point element."""

    bits: int
    mantissa: int
    min_exponent: int
    largest: float
    has_infinity: bool = True
    has_nan: bool = True

    @property
    def unit(self) -> float:
        """Relative error of a rounding in the normal range."""
        return 2.0 ** -(self.mantissa + 1)

    @property
    def tiny(self) -> float:
        """The smallest normal number."""
        return 2.0**self.min_exponent

    def rounding(self, size: Array, up_to: bool = False) -> Array:
        """Bound one rounding of numbers of this size, or up to it; subnormals may become zero."""
        normal = np.maximum(size * self.unit, self.tiny * self.unit)
        flushed = np.minimum(size, self.tiny)
        error = np.where(up_to | (size < self.tiny), np.maximum(flushed, normal), normal)
        return np.where(size > self.largest, np.inf, error)

    def nearest(self, size: Array) -> Array:
        """Bound one rounding of numbers up to this size to the nearest, which keeps subnormals."""
        return np.where(size > self.largest, np.inf, np.maximum(size, self.tiny) * self.unit)


@dataclasses.dataclass(frozen=True)
class Integer:
    """An integer element. ``offset`` is its zero where the format has no zero points."""

    bits: int
    lowest: int
    highest: int
    offset: int = 0

    @property
    def levels(self) -> int:
        """Steps from zero to the largest magnitude, where zero is in the middle."""
        return min(self.highest - self.offset, self.offset - self.lowest)


ELEMENTS: dict[str, Float | Integer] = {
    "f32": Float(32, 23, -126, bounds.LARGEST),
    "f16": Float(16, 10, -14, 65504.0),
    "bf16": Float(16, 7, -126, (2 - 2**-7) * 2.0**127),
    "e4m3": Float(8, 3, -6, 448.0, has_infinity=False),
    "e5m2": Float(8, 2, -14, 57344.0),
    "e2m1": Float(4, 1, 0, 6.0, has_infinity=False, has_nan=False),
    "i8": Integer(8, -128, 127),
    "u8": Integer(8, 0, 255),
    "i4": Integer(4, -8, 7),
    "u4": Integer(4, 0, 15, offset=8),
    "i16": Integer(16, -32768, 32767),
}

#: Code of UE8M0 that is no power of two: NaN (OCP MX 1.0, 5.4.1).
UE8M0_NAN = 255


def is_known(fmt: Format) -> bool:
    """Whether the kit can decode the format."""
    if ggml.is_block(fmt.element):
        return True
    if (element := ELEMENTS.get(fmt.element)) is None:
        return False
    scale_is_known = fmt.scale in {"none", "ue8m0"} or isinstance(ELEMENTS.get(fmt.scale), Float)
    zero_is_known = fmt.zero == "none" or (fmt.zero in ELEMENTS and isinstance(element, Integer))
    return scale_is_known and zero_is_known


def fill_bytes(fmt: Format, extent: int) -> int:
    """Round an extent up to what fills whole bytes, or blocks."""
    columns = block(fmt.element)[0] if ggml.is_block(fmt.element) else 0
    columns = columns or max(8 // ELEMENTS[fmt.element].bits, 1)
    return -(-extent // columns) * columns


def _small_float_table(element: Float, exponent_bits: int) -> Array:
    """All values of an 8-bit or 4-bit floating type by code, NaN and infinity included as such."""
    codes = np.arange(1 << element.bits)
    sign = np.where(codes >> (element.bits - 1), -1.0, 1.0)
    exponent = codes >> element.mantissa & ((1 << exponent_bits) - 1)
    fraction = (codes & ((1 << element.mantissa) - 1)) / 2.0**element.mantissa
    size = np.where(
        exponent == 0,
        fraction * element.tiny,
        (1 + fraction) * 2.0 ** (exponent - 1) * element.tiny,
    )
    beyond = np.where((fraction == 0) & element.has_infinity, np.inf, np.nan)
    return np.asarray(sign * np.where(size > element.largest, beyond, size))


def element_table(name: str) -> Array:
    """The value of every code of an element with at most eight bits."""
    element = ELEMENTS[name]
    if isinstance(element, Float):
        return _small_float_table(element, {"e4m3": 4, "e5m2": 5, "e2m1": 2}[name])
    codes = np.arange(1 << element.bits, dtype=np.int64)
    return np.where(codes > element.highest, codes - (1 << element.bits), codes).astype(np.float64)


# --- groups -------------------------------------------------------------------------------------


def group_extent(size: int, extent: int) -> int:
    """Length of a group: the whole extent where the format has none."""
    return min(size, extent) if size else extent


def group_counts(fmt: Format, n: int, k: int) -> tuple[int, int]:
    """Groups of a matrix: the shape of its scales and zero points."""
    return -(-n // group_extent(fmt.group_n, n)), -(-k // group_extent(fmt.group_k, k))


def per_group(fmt: Format, values: Array, ufunc: np.ufunc) -> Array:
    """Reduce each group of the format, and spread the results over the groups again."""
    n, k = values.shape
    step_n, step_k = group_extent(fmt.group_n, n), group_extent(fmt.group_k, k)
    rows = ufunc.reduceat(values, np.arange(0, n, step_n), axis=0)
    both = ufunc.reduceat(rows, np.arange(0, k, step_k), axis=1)
    return np.asarray(both.repeat(step_n, axis=0)[:n].repeat(step_k, axis=1)[:, :k])


def spread(fmt: Format, per_group_values: Array, n: int, k: int) -> Array:
    """Repeat what each group has for all of its weights."""
    rows = per_group_values.repeat(group_extent(fmt.group_n, n), axis=0)[:n]
    return np.asarray(rows.repeat(group_extent(fmt.group_k, k), axis=1)[:, :k])
