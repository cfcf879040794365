"""Block types of ggml and ik_llama.cpp: random blocks of chosen sizes, and what they mean.

`ktk.ggml` says what a block means, and where it keeps the floats that its other bytes are
multiplied with: random blocks do not hold random floats.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

from ktk.ggml import E4M3, E8M0, F16, F32, FLOATS, NIBBLES, block, decoded
from ktk.testing.bounds import Array

Bytes = npt.NDArray[np.uint8]

#: The smallest and the largest float of each kind that blocks are made with.
_RANGE = {F16: (2.0**-24, 65504.0), NIBBLES: (2.0**-24, 65504.0), E8M0: (2.0**-126, 2.0**110)}
_RANGE |= {E4M3: (2.0**-9, 448.0), F32: (2.0**-126, 2.0**110)}
_BYTES = {E4M3: 1, E8M0: 1, F16: 2, F32: 4}


def is_block(element: str) -> bool:
    """Whether an element is a type of blocks."""
    return element in FLOATS


def decode(element: str, rows: Bytes) -> Array:
    """What rows of blocks mean; each value is a float32."""
    return decoded(rows, element).astype(np.float64)


def reach(element: str, rows: Bytes) -> Array:
    """What roundings of a product grow with: the sizes of what a value is the sum of.

    That is the size of the value itself but for types with an offset, where both may be large and
    their difference small.
    """
    values = decode(element, rows)
    if not has_offset(element):
        return np.abs(values)
    at, nbytes = FLOATS[element].at + 2, block(element)[1]
    scaled = rows.copy()
    scaled.reshape(len(rows), -1, nbytes)[..., at : at + 2] = 0
    product = decode(element, scaled)
    return np.asarray(np.abs(product) + np.abs(values - product))


def encode(element: str, values: npt.NDArray[np.float32]) -> Bytes | None:
    """Quantise rows of values; None where the gguf package has no encoder.

    Scales are f16, and encoders divide by them: what is too large or too small for that is changed.
    """
    moderate = np.where(np.abs(values) < 2.0**-10, np.float32(0), np.clip(values, -1e4, 1e4))
    try:
        rows: Bytes = quantize(moderate, GGMLQuantizationType[element.upper()])
    except (KeyError, NotImplementedError):
        return None
    return rows


def random_blocks(
    element: str, shape: tuple[int, int], size: float, rng: np.random.Generator
) -> Bytes:
    """Make a matrix [n, k] of random blocks whose largest values are about `size`."""
    columns, nbytes = block(element)
    count = shape[0] * shape[1] // columns
    blocks = rng.integers(0, 256, (count, nbytes), dtype=np.uint8)
    kind = FLOATS[element].kind
    low, high = _RANGE[kind]
    lanes = 1 if kind == NIBBLES else FLOATS[element].size // _BYTES[kind]
    wanted = size / _reach(element) * rng.uniform(0.5, 2, (count, lanes))
    wanted = np.where(wanted > 0, np.clip(wanted, low, high), 0)
    _set(element, blocks, wanted * rng.choice([-1.0, 1.0], wanted.shape))
    return blocks.reshape(shape[0], -1)


def has_offset(element: str) -> bool:
    """Whether something is added to the products of codes and scales."""
    return FLOATS[element].kind == F16 and FLOATS[element].size > 2


def has_nan(element: str) -> bool:
    """Whether a block can hold a NaN: the scales of MXFP4 and NVFP4 have none."""
    return FLOATS[element].kind in (F16, F32, NIBBLES)


def with_nan(element: str, rows: Bytes, row: int, column: int) -> Bytes:
    """Return the matrix with a NaN for the scale of the block that has an element."""
    columns, nbytes = block(element)
    changed = rows.copy()
    blocks = changed.reshape(len(rows), -1, nbytes)[row, column // columns]
    _set(element, blocks[np.newaxis], np.full((1, 1), np.nan))
    return changed


@functools.cache
def _reach(element: str) -> float:
    """The largest value of blocks with floats of one."""
    nbytes = block(element)[1]
    blocks = np.random.default_rng(0).integers(0, 256, (64, nbytes), dtype=np.uint8)
    _set(element, blocks, np.ones((64, 1)))
    return float(np.abs(decode(element, blocks)).max())


def _set(element: str, blocks: Bytes, values: Array) -> None:
    """Write floats [blocks, floats of a block], which may be broadcast, into blocks."""
    where = FLOATS[element]
    place = blocks[:, where.at : where.at + where.size]
    if where.kind in (F16, F32):
        size = _BYTES[where.kind]
        lanes = np.broadcast_to(values, (len(blocks), where.size // size))
        place[:] = lanes.astype(f"<f{size}").view(np.uint8)
    elif where.kind == NIBBLES:
        bits = values[:, :1].astype("<f2").view("<u2")
        words = np.ascontiguousarray(place).view("<u2") & 0x0FFF
        words |= (bits >> np.array([0, 4, 8, 12], "<u2") & 15) << 12
        place[:] = words.view(np.uint8)
    elif where.kind == E8M0:
        # Half of what the exponent alone says: the codes are twice their values.
        exponent = np.log2(np.maximum(np.abs(values), 2.0**-127)) + 128
        place[:] = np.rint(exponent).astype(np.uint8)
    else:
        place[:] = _to_e4m3(np.broadcast_to(np.abs(values), place.shape))


def _to_e4m3(values: Array) -> Bytes:
    """Unsigned E4M3, rounded towards zero; 0 and all up to 448."""
    table = np.arange(127)
    exponent, fraction = table >> 3, (table & 7) / 8
    sizes = np.where(exponent == 0, fraction * 2.0**-6, (1 + fraction) * 2.0 ** (exponent - 7))
    return np.maximum(np.searchsorted(sizes, values, "right") - 1, 0).astype(np.uint8)
