"""Block types that ik_llama.cpp adds to ggml's: sizes, where a row keeps its scale, and values.

A block is 256 values. Its bytes are drawn in backends/llamafile/gguf/blocks/ik.h. Groups of 16 or
32 values have an integer scale and one bit, which shifts the entries that codes stand for::

    value = d * sub * (table[code] + shift)

Some types have d once for a row, in front of its blocks. ktk puts a copy in front of each block
instead, so that rows are blocks and nothing else, which can be cut between any two::

    file   | d | block | block | ...            ktk   | d block | d block | ...

Source: ik_llama.cpp (MIT), ggml/include/ggml.h for numbers, ggml/src/ggml-common.h for blocks and
tables, ggml/src/iqk/iqk_quantize.cpp for values, at commit 8337e4cd of 2026-08-15.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

#: Values of a block of any of these types.
COLUMNS = 256
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

_TWO = np.array([-31, -13, 1, 17])
_THREE = np.array([-63, -40, -23, -10, 1, 13, 28, 47])
_FOUR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
_FIVE = np.array(
    [
        *(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6),
        *(-1, 5, 11, 17, 23, 29, 36, 43, 51, 59, 68, 77, 87, 97, 109, 121),
    ]
)
# What the indices of iq2_kl stand for: codes of a value and of the next one.
_FIRST = [0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6]
_NEXT = [2, 5, 0, 3, 5, 7, 1, 2, 4, 5, 6, 0, 4, 5, 7, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 0, 2, 4, 6, 7]
_PAIRS = np.array([[*_FIRST, 7, 7], [*_NEXT, 2, 5]]).T


@dataclass(frozen=True)
class Parts:
    """What blocks are made of, d apart.

    Attributes
    ----------
    codes
        [blocks, 256].
    sub
        [blocks, groups]: integers that d is multiplied with.
    shifted
        [blocks, groups]: 0 or 1.
    """

    codes: Ints
    sub: Ints
    shifted: Ints


@dataclass(frozen=True)
class IkType:
    """A type.

    Attributes
    ----------
    name
        ik_llama.cpp's, in lower case.
    number
        Its ggml_type, which files have.
    nbytes
        Of a block, its d included.
    table
        What codes stand for, unless their group is shifted.
    shift
        What is added to entries of shifted groups.
    parts
        Takes the bytes of blocks behind d, [blocks, nbytes - size of d], apart.
    d
        "<f2" or "<f4".
    of_row
        Whether files have d once for a row.
    """

    name: str
    number: int
    nbytes: int
    table: npt.NDArray[np.int64]
    shift: int
    parts: Callable[[Bytes], Parts]
    d: str = "<f2"
    of_row: bool = False

    @property
    def row_prefix(self) -> int:
        """Bytes of a row in a file before its first block."""
        return np.dtype(self.d).itemsize if self.of_row else 0

    def row_nbytes(self, columns: int) -> int:
        """Return the bytes of a row in a file."""
        return self.row_prefix + columns // COLUMNS * (self.nbytes - self.row_prefix)

    def blocks_of(self, rows: Bytes) -> Bytes:
        """Turn rows of a file, [n, bytes], into rows of blocks that have a d each."""
        prefix = self.row_prefix
        if prefix == 0:
            return rows
        found = np.empty(
            (len(rows), (rows.shape[1] - prefix) // (self.nbytes - prefix) * self.nbytes), np.uint8
        )
        blocks = found.reshape(len(rows), -1, self.nbytes)
        blocks[:, :, :prefix] = rows[:, np.newaxis, :prefix]
        blocks[:, :, prefix:] = rows[:, prefix:].reshape(len(rows), -1, self.nbytes - prefix)
        return found

    def values(self, rows: Bytes) -> npt.NDArray[np.float32]:
        """Return what rows of blocks mean, f32 [n, k], rounded where ik_llama.cpp rounds."""
        blocks = rows.reshape(-1, self.nbytes)
        width = np.dtype(self.d).itemsize
        d = blocks[:, :width].copy().view(self.d).astype(np.float32)
        parts = self.parts(blocks[:, width:])
        group = COLUMNS // parts.sub.shape[1]
        entries = self.table[parts.codes] + self.shift * np.repeat(parts.shifted, group, axis=1)
        scales = np.repeat(d * parts.sub.astype(np.float32), group, axis=1)
        values: npt.NDArray[np.float32] = scales * entries.astype(np.float32)
        return values.reshape(len(rows), -1)


def _bits(found: Bytes, width: int) -> Ints:
    """Split bytes into numbers of so many bits, the lowest one first."""
    shifts = np.arange(0, 8, width)
    return (
        (found[:, :, np.newaxis] >> shifts & (1 << width) - 1)
        .reshape(len(found), -1)
        .astype(np.int32)
    )


def _strided(found: Bytes, width: int, columns: int) -> Ints:
    """Split bytes so that those of number i of a byte follow those of number i - 1.

    `columns` bytes are taken together.
    """
    shifts = np.arange(0, 8, width)[:, np.newaxis]
    apart = found.reshape(len(found), -1, 1, columns) >> shifts & (1 << width) - 1
    return apart.reshape(len(found), -1).astype(np.int32)


def _iq2_k(block: Bytes) -> Parts:
    return Parts(
        _strided(block[:, 10:], 2, 32), _bits(block[:, 2:10], 4) - 8, _bits(block[:, :2], 1)
    )


def _iq3_k(block: Bytes) -> Parts:
    codes = _strided(block[:, 12:76], 2, 32) | _strided(block[:, 76:], 1, 32) << 2
    size = 2 * _bits(block[:, 4:12], 4) + 1
    return Parts(codes, np.where(_bits(block[:, 2:4], 1), -size, size), _bits(block[:, :2], 1))


def _iq4_scales(block: Bytes) -> tuple[Ints, Ints]:
    sub = _bits(block[:, 6:14], 4) | _bits(block[:, 2:6], 2) << 4
    return sub - 32, _bits(block[:, :2], 1)


def _iq4_k(block: Bytes) -> Parts:
    return Parts(_strided(block[:, 14:], 4, 16), *_iq4_scales(block))


def _iq5_k(block: Bytes) -> Parts:
    codes = _strided(block[:, 14:142], 4, 32) | _strided(block[:, 142:], 1, 32) << 4
    return Parts(codes, *_iq4_scales(block))


def _iq2_ks(block: Bytes) -> Parts:
    sub = _bits(block[:, 2:6], 4) | _bits(block[:, 1:2], 1) << 4
    return Parts(_strided(block[:, 6:], 2, 32), sub - 16, _bits(block[:, :1], 1))


def _iq3_ks(block: Bytes) -> Parts:
    codes = _strided(block[:, 6:70], 2, 32) | _strided(block[:, 70:], 1, 32) << 2
    sub = _strided(block[:, 2:6], 4, 4) | _bits(block[:, :1], 1) << 4
    return Parts(codes, sub - 16, _bits(block[:, 1:2], 1))


def _odd_scales(found: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    return (found & 254) - 127, found & 1


def _iq4_ks(block: Bytes) -> Parts:
    return Parts(_strided(block[:, 8:], 4, 16), *_odd_scales(block[:, :8].astype(np.int32)))


def _iq5_ks(block: Bytes) -> Parts:
    codes = _strided(block[:, 8:136], 4, 32) | _strided(block[:, 136:], 1, 32) << 4
    return Parts(codes, *_odd_scales(block[:, :8].astype(np.int32)))


def _iq4_kss(block: Bytes) -> Parts:
    words = block.copy().view("<u2")
    even = words & 0xFFFE
    codes = _strided((even ^ even >> 1).view(np.uint8), 4, 16)
    scales = (words.reshape(len(block), 8, 8) & 1) @ (1 << np.arange(8))
    return Parts(codes, *_odd_scales(scales.astype(np.int32)))


def _iq2_kl(block: Bytes) -> Parts:
    high = np.tile(block[:, 70:], 1)[:, np.newaxis] >> np.arange(8)[:, np.newaxis] & 1
    index = _strided(block[:, 6:70], 4, 16) | high.reshape(len(block), -1).astype(np.int32) << 4
    sub = _strided(block[:, 2:6], 4, 4) | _bits(block[:, :2], 2) << 4
    codes = _PAIRS[index].reshape(len(block), -1).astype(np.int32)
    return Parts(codes, sub - 32, np.zeros_like(sub))


_ALL = (
    IkType("iq2_k", 137, 76, _TWO, 5, _iq2_k),
    IkType("iq3_k", 138, 110, _THREE, 4, _iq3_k),
    IkType("iq4_k", 139, 144, _FOUR, 4, _iq4_k),
    IkType("iq5_k", 140, 176, _FIVE, 2, _iq5_k),
    IkType("iq4_ks", 144, 140, _FOUR, 4, _iq4_ks, "<f4", of_row=True),
    IkType("iq2_ks", 145, 72, _TWO, 5, _iq2_ks, of_row=True),
    IkType("iq4_kss", 146, 132, _FOUR, 4, _iq4_kss, "<f4", of_row=True),
    IkType("iq5_ks", 152, 172, _FIVE, 2, _iq5_ks, "<f4", of_row=True),
    IkType("iq3_ks", 156, 104, _THREE, 4, _iq3_ks, of_row=True),
    IkType("iq2_kl", 157, 88, _THREE, 0, _iq2_kl, of_row=True),
)
#: By name, and by number.
TYPES = {one.name: one for one in _ALL}
NUMBERS = {one.number: one for one in _ALL}
