"""What the formats of ``ktk/abi.h`` mean: their values in float64, and their resolution.

A format is anything with the attributes of ``ktk._core.Format``: ``element``, ``scale``, ``zero``
(names such as "bf16"), ``group_n`` and ``group_k``.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

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
}

#: Code of UE8M0 that is no power of two: NaN (OCP MX 1.0, 5.4.1).
UE8M0_NAN = 255
#: Elements with few levels: what chooses a scale for them may trade single values for their group.
COARSE_BITS = 4


def is_known(fmt: Format) -> bool:
    """Whether the kit can decode the format."""
    if ggml.is_block(fmt.element):
        return True
    integers = {name for name, element in ELEMENTS.items() if isinstance(element, Integer)}
    floats = set(ELEMENTS) - integers
    return (
        fmt.element in ELEMENTS
        and fmt.scale in {"none", "ue8m0", *floats}
        and (fmt.zero == "none" or (fmt.zero in ELEMENTS and fmt.element in integers))
    )


def has_resolution(fmt: Format) -> bool:
    """Whether `codec_bound` knows the format: how values become ggml's blocks is free."""
    return is_known(fmt) and not ggml.is_block(fmt.element)


def fill_bytes(fmt: Format, extent: int) -> int:
    """Round an extent up to what fills whole bytes, or blocks."""
    columns = ggml.block(fmt.element)[0] if ggml.is_block(fmt.element) else 0
    columns = columns or max(8 // ELEMENTS[fmt.element].bits, 1)
    return -(-extent // columns) * columns


# --- resolution ---------------------------------------------------------------------------------


def _group(size: int, extent: int) -> int:
    return min(size, extent) if size else extent


def per_group(fmt: Format, values: Array, ufunc: np.ufunc) -> Array:
    """Reduce each group of the format, and spread the results over the groups again."""
    n, k = values.shape
    step_n, step_k = _group(fmt.group_n, n), _group(fmt.group_k, k)
    rows = ufunc.reduceat(values, np.arange(0, n, step_n), axis=0)
    both = ufunc.reduceat(rows, np.arange(0, k, step_k), axis=1)
    return np.asarray(both.repeat(step_n, axis=0)[:n].repeat(step_k, axis=1)[:, :k])


def _unit(name: str) -> float:
    """Relative error of a rounding to an element that may be an integer, which has none."""
    element = ELEMENTS[name]
    return element.unit if isinstance(element, Float) else 0.0


def codec_bound(fmt: Format, size: Array, up_to: bool = False) -> Array:
    """Bound for what storing values of this size in the format may change.

    Half a step of the element, plus what rounding the scale and dividing by it add.

    Parameters
    ----------
    fmt : Format
        The format that is stored.
    size : array of shape (n, k)
        Magnitudes of the values.
    up_to : bool
        The sizes are only upper bounds of the magnitudes.

    Returns
    -------
    array of shape (n, k)
    """
    element = ELEMENTS[fmt.element]
    if fmt.scale == "none":
        if isinstance(element, Float):
            return element.rounding(size, up_to)
        return np.where(size > element.levels, np.inf, 0.5)

    top = per_group(fmt, size, np.maximum)
    # Relative error of the scale itself, and by how much it may exceed the ideal one.
    if fmt.scale == "ue8m0":
        scale_unit, scale_tiny, growth = 0.0, 2.0**-127, 2.0
    else:
        scale_type = ELEMENTS[fmt.scale]
        assert isinstance(scale_type, Float)
        scale_unit, scale_tiny, growth = scale_type.unit, scale_type.tiny, 1.0
    slack = scale_unit + 4 * bounds.UNIT
    if isinstance(element, Integer):
        # With zero points the range is at most twice the largest magnitude, in all the codes. What
        # a rounded scale shifts adds up from one end of the codes in use to the other, and so
        # does what rounds a zero point, which is one of the codes or lies between two.
        span = element.highest - element.lowest
        levels, reach = float(element.levels), element.levels
        if fmt.zero != "none":
            levels, reach = span / 2, span
            slack += _unit(fmt.zero)
        step = top / levels
        error = step * (growth / 2 + reach * slack)
        return np.asarray(error + reach * scale_tiny)
    # Floating point: the error grows with the value, down to half of the subnormal step.
    scale = growth * top / element.largest
    error = np.maximum(size * element.unit * growth, scale * element.tiny * element.unit)
    return np.asarray(error + size * slack + element.largest * scale_tiny)


def check_codec(stored: Format, given: Format, unpacked: npt.ArrayLike, values: Array) -> None:
    """Fail where storing weights lost more than the stored format explains.

    Half a step for each value, if the backend takes the scale from the largest magnitude. With four
    bits it does better to search the scale of the least squared error: that scale may cut off the
    largest value to make the steps finer for all others, so no bound on a single value remains. One
    for the group does: the scale of the largest magnitude is one that the search may choose, so the
    squared error of its best is at most

        sum over the group of (half a step of the largest magnitude) ** 2.

    Rounding to that scale keeps this bound too, value by value, so it holds either way; and a scale
    that belongs to another extent than the declared group breaks it.

    Parameters
    ----------
    stored, given : Format
        What the backend stores, and what it was given. Where they are the same there is nothing to
        choose.
    unpacked, values : array of shape (n, k)
        What came back, and the numbers that were given.
    """
    bound = codec_bound(stored, np.abs(values))
    chosen = stored != given and stored.scale != "none"
    if not chosen or ELEMENTS[stored.element].bits > COARSE_BITS:
        bounds.check(unpacked, values, bound, "unpacked weight")
        return
    with np.errstate(invalid="ignore", over="ignore"):
        error = group_norm(stored, np.asarray(unpacked, np.float64) - values)
        allowed = group_norm(stored, bound)
    bounds.check(error, 0.0, allowed, "norm of a group's error")


def group_norm(fmt: Format, values: Array) -> Array:
    """L2 norm of each group, spread over the group; of any size that float64 holds."""
    top = per_group(fmt, np.abs(values), np.maximum)
    size = np.where((top > 0) & np.isfinite(top), top, 1.0)
    norm = size * np.sqrt(per_group(fmt, (values / size) ** 2, np.add))
    return np.where(np.isfinite(top), norm, top)


# --- values -------------------------------------------------------------------------------------


class Summary:
    """Failing examples show the repr, and not every field as Hypothesis does for dataclasses."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True)
class Source(Summary):
    """A weight matrix as a checkpoint may give it, and the numbers it means.

    ``stored`` is what the backend shall store it as.
    """

    format: Any
    stored: Any
    data: Any = dataclasses.field(repr=False)
    scale: Any = dataclasses.field(repr=False)
    zero: Any = dataclasses.field(repr=False)
    values: Array = dataclasses.field(repr=False)

    @property
    def reach(self) -> Array:
        """What the roundings of a product grow with, beside the size of what is stored."""
        if ggml.is_block(self.format.element) and self.format == self.stored:
            return ggml.reach(self.format.element, self.data)
        return np.zeros_like(self.values)


def _to_bf16(values: npt.NDArray[np.float32]) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)


def as_float64(array: Any) -> Array:
    """Return a numpy array or a tensor of any floating type as float64."""
    if isinstance(array, torch.Tensor):
        return np.asarray(array.detach().to(torch.float64).numpy())
    return np.asarray(array, np.float64)


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


def _decode(fmt: Format, codes: Array) -> Array:
    """Shift elements of an integer type without zero points to where its zero is."""
    element = ELEMENTS[fmt.element]
    if isinstance(element, Integer) and fmt.zero == "none":
        return codes - element.offset
    return codes


def _pack_nibbles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two elements to a byte, the even column in the low half."""
    padded = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
    return (padded[:, ::2] | padded[:, 1::2] << 4).astype(np.uint8)


def make_source(
    fmt: Any, values: npt.NDArray[np.float32], rng: np.random.Generator, stored: Any = None
) -> Source:
    """Make a matrix in format ``fmt``, to be stored as ``stored`` (default: the same).

    Formats without scale store ``values``, rounded. Formats with one store random codes; their
    scales follow the sizes of ``values``. Codes and scales that are NaN are left to `with_nan`.
    ggml's blocks are random or, where the gguf package can encode them, one time in two ``values``.
    """
    stored = fmt if stored is None else stored
    n, k = values.shape
    if ggml.is_block(fmt.element):
        rows = ggml.encode(fmt.element, values) if rng.random() < 0.5 else None
        if rows is None:
            rows = ggml.random_blocks(fmt.element, (n, k), _typical(values), rng)
        return Source(fmt, stored, rows, None, None, ggml.decode(fmt.element, rows))
    element = ELEMENTS[fmt.element]
    data: Any
    if element.bits > 8:
        if fmt.element == "f16":
            values = np.clip(values, -65504, 65504)
        data = _to_float(fmt.element, values)
        decoded = as_float64(data)
    else:
        table = element_table(fmt.element)
        codes = rng.choice(np.flatnonzero(np.isfinite(table)), size=(n, k)).astype(np.uint8)
        decoded = table[codes]
        data = codes.view(np.int8) if fmt.element == "i8" else codes
        if element.bits == 4:
            data = _pack_nibbles(codes)
    decoded = _decode(fmt, decoded)
    scale, zero = None, None
    if fmt.scale != "none":
        groups = group_counts(fmt, n, k)
        if fmt.zero != "none":
            zero = _make_zero(fmt, groups, rng)
            decoded = decoded - _spread(fmt, as_float64(zero), n, k)
        scale, exact_scale = _make_scale(fmt, values, groups, rng)
        decoded = decoded * _spread(fmt, exact_scale, n, k)
    return Source(fmt, stored, data, scale, zero, decoded)


def group_counts(fmt: Format, n: int, k: int) -> tuple[int, int]:
    """Groups of a matrix: the shape of its scales and zero points."""
    return -(-n // _group(fmt.group_n, n)), -(-k // _group(fmt.group_k, k))


def _make_zero(fmt: Format, groups: tuple[int, int], rng: np.random.Generator) -> Any:
    """Zero points among the codes and, where their type holds it, one above.

    GPTQ's first version keeps zero points minus one, so that its 15 means 16.
    """
    element, kind = ELEMENTS[fmt.element], ELEMENTS[fmt.zero]
    assert isinstance(element, Integer)
    if isinstance(kind, Float):
        between = rng.uniform(element.lowest, element.highest, groups).astype(np.float32)
        return _to_float(fmt.zero, between)
    highest = min(element.highest + 1, kind.highest)
    zero = rng.integers(element.lowest, highest + 1, groups)
    return zero.astype(np.int8 if kind.lowest < 0 else np.uint8)


def _spread(fmt: Format, per_group_values: Array, n: int, k: int) -> Array:
    rows = per_group_values.repeat(_group(fmt.group_n, n), axis=0)[:n]
    return np.asarray(rows.repeat(_group(fmt.group_k, k), axis=1)[:, :k])


def _make_scale(
    fmt: Format, values: npt.NDArray[np.float32], groups: tuple[int, int], rng: np.random.Generator
) -> tuple[Any, Array]:
    """Positive scales that make the weights about as large as the values, in the format's type."""
    element = ELEMENTS[fmt.element]
    largest = element.largest if isinstance(element, Float) else element.levels
    typical = np.clip(_typical(values), 2.0**-100, 2.0**100)
    wanted = (typical * rng.uniform(0.5, 2, groups) / largest).astype(np.float32)
    if fmt.scale == "ue8m0":
        exponent = np.clip(np.rint(np.log2(wanted)), -110, 110)
        return (exponent + 127).astype(np.uint8), 2.0**exponent
    if fmt.scale == "f16":
        wanted = np.clip(wanted, 2.0**-14, 65504)
    scale = _to_float(fmt.scale, wanted)
    return scale, as_float64(scale)


def _typical(values: npt.NDArray[np.float32]) -> float:
    return float(np.abs(values).max(initial=0))


def _to_float(name: str, values: npt.NDArray[np.float32]) -> Any:
    """Return an array of a floating type: bf16 as a tensor, which numpy does not know."""
    if name == "bf16":
        return _to_bf16(values)
    return values.astype(np.float16) if name == "f16" else values


# --- NaN ----------------------------------------------------------------------------------------


def nan_places(fmt: Format) -> tuple[str, ...]:
    """Where the format has a NaN: in ``data``, in ``scale``, in both or nowhere."""
    if ggml.is_block(fmt.element):
        return ("data",) if ggml.has_nan(fmt.element) else ()
    element = ELEMENTS[fmt.element]
    places = ("data",) if isinstance(element, Float) and element.has_nan else ()
    return places if fmt.scale == "none" else (*places, "scale")


def with_nan(source: Source, place: str, row: int, column: int) -> Source:
    """Return the matrix with a NaN for one weight, or in the scale of its group or block."""
    fmt, (n, k) = source.format, source.values.shape
    if ggml.is_block(fmt.element):
        rows = ggml.with_nan(fmt.element, source.data, row, column)
        return dataclasses.replace(source, data=rows, values=ggml.decode(fmt.element, rows))
    array = getattr(source, place)
    array = array.clone() if isinstance(array, torch.Tensor) else array.copy()
    hit = np.zeros(source.values.shape, bool)
    if place == "data":
        hit[row, column] = True
        at = row, column
        kind = fmt.element
    else:
        at = row // _group(fmt.group_n, n), column // _group(fmt.group_k, k)
        one = np.zeros(group_counts(fmt, n, k))
        one[at] = 1
        hit = _spread(fmt, one, n, k) > 0
        kind = fmt.scale
    if kind == "ue8m0":
        array[at] = UE8M0_NAN
    elif ELEMENTS[kind].bits == 8:
        array[at] = np.flatnonzero(np.isnan(element_table(kind)))[0]
    else:
        array[at] = np.nan
    changed: dict[str, Any] = {place: array, "values": np.where(hit, np.nan, source.values)}
    return dataclasses.replace(source, **changed)
