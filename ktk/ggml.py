"""What blocks mean: their values, and where they keep the floats that all have in common.

ggml's own types are decoded by the gguf package, those of ik_llama.cpp by `ktk.ik_types`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from ktk import ik_types

# Rows that are decoded at a time: gguf holds their values twice.
_ROWS = 64
F16, F32, E8M0, E4M3, NIBBLES = "f16", "f32", "e8m0", "e4m3", "nibbles"


@dataclass(frozen=True)
class Floats:
    """The floats of a block: bytes [at, at + size) hold one or more of a kind."""

    at: int
    size: int
    kind: str = F16


# Types with an offset have two: d, and the one of the offset.
FLOATS = {
    "q4_0": Floats(0, 2),
    "q4_1": Floats(0, 4),
    "q5_0": Floats(0, 2),
    "q5_1": Floats(0, 4),
    "q8_0": Floats(0, 2),
    "q2_k": Floats(80, 4),
    "q3_k": Floats(108, 2),
    "q4_k": Floats(0, 4),
    "q5_k": Floats(0, 4),
    "q6_k": Floats(208, 2),
    "iq1_s": Floats(0, 2),
    "iq1_m": Floats(48, 8, NIBBLES),  # an f16 in the upper nibbles of four words
    "iq2_xxs": Floats(0, 2),
    "iq2_xs": Floats(0, 2),
    "iq2_s": Floats(0, 2),
    "iq3_xxs": Floats(0, 2),
    "iq3_s": Floats(0, 2),
    "iq4_nl": Floats(0, 2),
    "iq4_xs": Floats(0, 2),
    "tq1_0": Floats(52, 2),
    "tq2_0": Floats(64, 2),
    "ggml:41": Floats(0, 2),  # Q1_0, which no backend has a name for
    "mxfp4": Floats(0, 1, E8M0),
    "nvfp4": Floats(0, 4, E4M3),
    **{
        one.name: Floats(0, 2) if one.d == "<f2" else Floats(0, 4, F32)
        for one in ik_types.TYPES.values()
    },
}


def block(element: str) -> tuple[int, int]:
    """Return the elements and the bytes of a block.

    Parameters
    ----------
    element
        Name of a type: q4_k, say.
    """
    if element in ik_types.TYPES:
        return ik_types.TYPES[element].columns, ik_types.TYPES[element].nbytes
    columns, nbytes = GGML_QUANT_SIZES[_type(element)]
    return int(columns), int(nbytes)


def decoded(rows: np.ndarray, element: str) -> np.ndarray:
    """Return the values of a matrix of blocks, f32 [n, k].

    Parameters
    ----------
    rows
        uint8 [n, bytes of a row].
    element
        Name of their type: q4_k, say.

    Raises
    ------
    ValueError
        gguf cannot decode the type; the message ends a sentence about a tensor.
    """
    columns, nbytes = block(element)
    values = np.empty((len(rows), rows.shape[1] // nbytes * columns), np.float32)
    with np.errstate(all="ignore"):
        for row in range(0, len(values), _ROWS):
            values[row : row + _ROWS] = _decoded(rows[row : row + _ROWS], element)
    return values


def _decoded(rows: np.ndarray, element: str) -> np.ndarray:
    if element in ik_types.TYPES:
        return ik_types.TYPES[element].values(rows)
    kind = _type(element)
    try:
        return _dequantize(rows, kind)
    except NotImplementedError:
        raise ValueError(
            f"has the type {kind.name}, which gguf {version('gguf')} cannot decode"
        ) from None


def _dequantize(rows: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """Return the values of rows of blocks, also of types that gguf 0.19 names and cannot decode."""
    if kind.name != "Q1_0":
        return dequantize(rows, kind)
    # 128 weights, 18 bytes: d as f16, then a bit for each weight, the lowest first: d or -d.
    blocks = rows.reshape(-1, 18)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little")
    return np.where(bits == 1, scale, -scale).reshape(len(rows), -1)


def not_finite(data: np.ndarray, element: str) -> int:
    """Count blocks with a scale that is infinite or no number; 0 for types without such floats.

    Parameters
    ----------
    data
        uint8 [bytes] of whole blocks.
    element
        Name of their type: q4_k, say.
    """
    place = FLOATS.get(element)
    if place is None or place.kind in (E8M0, E4M3):
        # ggml reads every byte of these as a number.
        return 0
    _, nbytes = block(element)
    found = data.reshape(-1, nbytes)[:, place.at : place.at + place.size]
    if place.kind == F16:
        bad = (found.copy().view(np.uint16) & 0x7C00) == 0x7C00
    elif place.kind == F32:
        bad = (found.copy().view(np.uint32) & 0x7F800000) == 0x7F800000
    else:
        # Three bits of the exponent are in the last word, two in the one before.
        bad = (found[:, 7:8] >> 4 & 7 == 7) & (found[:, 5:6] >> 6 == 3)
    return int(np.count_nonzero(bad.any(axis=1)))


def _type(element: str) -> GGMLQuantizationType:
    number = element.removeprefix("ggml:")
    if number != element:
        return GGMLQuantizationType(int(number))
    return GGMLQuantizationType[element.upper()]
