"""Weight matrices as checkpoints may give them, with the numbers they mean in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ktk.testing import ggml
from ktk.testing.bounds import Array
from ktk.testing.elements import (
    ELEMENTS,
    UE8M0_NAN,
    Float,
    Format,
    Integer,
    element_table,
    fill_bytes,
    group_counts,
    group_extent,
    spread,
)

#: How many of the scales that are stored as given are at an edge of what their type holds.
OFTEN_AT_EDGES = 0.2


class Summary:
    """Failing examples show the repr, and not every field as Hypothesis does for dataclasses."""

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        del cycle
        printer.text(repr(self))


@dataclasses.dataclass(frozen=True, repr=False)
class Source(Summary):
    """A weight matrix as a checkpoint may give it, and the numbers it means.

    ``stored`` is what the backend shall store it as.
    """

    format: Any
    stored: Any
    data: Any
    scale: Any
    zero: Any
    values: Array

    def __repr__(self) -> str:
        n, k = self.values.shape
        return f"Source(n={n}, k={k}, format={self.format}, stored={self.stored})"

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
    fmt: Any,
    values: npt.NDArray[np.float32],
    rng: np.random.Generator,
    stored: Any = None,
    *,
    at_edges: bool = False,
) -> Source:
    """Make a matrix in format ``fmt``, to be stored as ``stored`` (default: the same).

    Formats without scale store ``values``, rounded. Formats with one store random codes; their
    scales follow the sizes of ``values``, and ``at_edges`` some of those that are stored as given
    are those of `_at_edges`. Codes and scales that are NaN are left to `with_nan`. ggml's blocks
    are random or, where the gguf package can encode them, one time in two ``values``.
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
        finite = np.flatnonzero(np.isfinite(table)).astype(np.uint8)
        codes = finite[rng.integers(len(finite), size=(n, k), dtype=np.uint8)]
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
            decoded = decoded - spread(fmt, as_float64(zero), n, k)
        scale, exact_scale = _make_scale(
            fmt, values, groups, rng, at_edges=at_edges and fmt == stored
        )
        decoded = decoded * spread(fmt, exact_scale, n, k)
    return Source(fmt, stored, data, scale, zero, decoded)


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


def _make_scale(
    fmt: Format,
    values: npt.NDArray[np.float32],
    groups: tuple[int, int],
    rng: np.random.Generator,
    *,
    at_edges: bool,
) -> tuple[Any, Array]:
    """Scales that make the weights about as large as the values, in the format's type.

    They are positive, but ``at_edges`` a few of them: see `_at_edges`.
    """
    element = ELEMENTS[fmt.element]
    largest = element.largest if isinstance(element, Float) else element.levels
    typical = np.clip(_typical(values), 2.0**-100, 2.0**100)
    wanted = (typical * rng.uniform(0.5, 2, groups) / largest).astype(np.float32)
    if fmt.scale == "ue8m0":
        exponent = np.clip(np.rint(np.log2(wanted)), -110, 110)
        if at_edges:  # code 0 is a subnormal number of f32
            small = rng.integers(0, 17, groups) - 127
            exponent = np.where(rng.random(groups) < OFTEN_AT_EDGES, small, exponent)
        return (exponent + 127).astype(np.uint8), 2.0**exponent
    if fmt.scale == "e4m3":
        wanted = np.clip(wanted, 2.0**-9, 448)  # the least subnormal, the largest number
    elif fmt.scale == "f16":
        wanted = np.clip(wanted, 2.0**-14, 65504)
    if at_edges:
        wanted = _at_edges(fmt.scale, wanted, rng)
    if fmt.scale == "e4m3":
        code = torch.from_numpy(wanted).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return code, element_table("e4m3")[code]
    scale = _to_float(fmt.scale, wanted)
    return scale, as_float64(scale)


def _at_edges(
    name: str, scale: npt.NDArray[np.float32], rng: np.random.Generator
) -> npt.NDArray[np.float32]:
    """Make a few scales 0, as of pruned groups, the least subnormal number, or negative."""
    kind = ELEMENTS[name]
    assert isinstance(kind, Float)
    least = kind.tiny * 2.0**-kind.mantissa
    which = rng.random(scale.shape) / OFTEN_AT_EDGES
    places = [which < 1 / 3, which < 2 / 3, which < 1]
    return np.select(places, [np.zeros_like(scale), least, -scale], scale).astype(np.float32)


def _typical(values: npt.NDArray[np.float32]) -> float:
    return float(np.abs(values).max(initial=0))


def _to_float(name: str, values: npt.NDArray[np.float32]) -> Any:
    """Return an array of a floating type: bf16 as a tensor, which numpy does not know."""
    if name == "bf16":
        return _to_bf16(values)
    return values.astype(np.float16) if name == "f16" else values


# --- rows that lie apart ------------------------------------------------------------------------


def with_rows_apart(source: Source, before: int, behind: int, rng: np.random.Generator) -> Source:
    """Return the matrix as columns of a wider one, with any bits in the columns around it.

    So a checkpoint may have it, and so shards cut it: ``before`` and ``behind`` count elements, or
    what fills whole bytes or blocks, and groups.
    """
    step = 1  # items of data that are a block
    if ggml.is_block(source.format.element):
        blocks = source.values.shape[1] // fill_bytes(source.format, 1)
        step = source.data.shape[1] // blocks

    def widened(array: Any, step: int) -> Any:
        if array is None:
            return None
        if isinstance(array, torch.Tensor):  # bf16
            bits = widened(array.view(torch.int16).numpy(), step)
            return torch.from_numpy(bits).view(array.dtype)
        begin, end = before * step, before * step + array.shape[1]
        row_bytes = (end + behind * step) * array.itemsize
        wide = rng.integers(0, 256, (len(array), row_bytes), np.uint8).view(array.dtype)
        wide[:, begin:end] = array
        return wide[:, begin:end]

    arrays = {"data": widened(source.data, step)}
    arrays |= {name: widened(getattr(source, name), 1) for name in ("scale", "zero")}
    return dataclasses.replace(source, **arrays)


# --- NaN and infinity -----------------------------------------------------------------------------


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
        at = row // group_extent(fmt.group_n, n), column // group_extent(fmt.group_k, k)
        one = np.zeros(group_counts(fmt, n, k))
        one[at] = 1
        hit = spread(fmt, one, n, k) > 0
        kind = fmt.scale
    if kind == "ue8m0":
        array[at] = UE8M0_NAN
    elif ELEMENTS[kind].bits == 8:
        array[at] = np.flatnonzero(np.isnan(element_table(kind)))[0]
    else:
        array[at] = np.nan
    changed: dict[str, Any] = {place: array, "values": np.where(hit, np.nan, source.values)}
    return dataclasses.replace(source, **changed)


def has_infinity(fmt: Format) -> bool:
    """Whether a weight of the format can be infinite: scales of 0 would make NaN of it."""
    if ggml.is_block(fmt.element) or fmt.scale != "none":
        return False
    element = ELEMENTS[fmt.element]
    return isinstance(element, Float) and element.has_infinity


def with_infinity(source: Source, row: int, column: int, value: float) -> Source:
    """Return the matrix, which has no scales, with an infinite weight."""
    data = source.data.clone() if isinstance(source.data, torch.Tensor) else source.data.copy()
    if ELEMENTS[source.format.element].bits == 8:
        data[row, column] = np.flatnonzero(element_table(source.format.element) == value)[0]
    else:
        data[row, column] = value
    values = source.values.copy()
    values[row, column] = value
    return dataclasses.replace(source, data=data, values=values)
