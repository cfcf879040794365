"""Block types that ik_llama.cpp adds to ggml's: sizes, where a row keeps its scale, and values.

A block is 256 values, or 32. Its bytes are drawn in backends/llamafile/gguf/blocks/ik.h, and in
backends/llamafile/floats/blocks.h for IQ6_K and the trellis types, whose names end in KT. Groups of
16 or 32 values have an integer scale, and of some types one bit, which shifts the entries that
codes stand for::

    value = d * sub * (table[code] + shift)

A code of the trellis types is not stored: a seed of 16 bits begins a sequence of four or eight.

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

# Values of a block of all but two of these types.
_COLUMNS = 256
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


def _cubic() -> npt.NDArray[np.float32]:
    """Return the entries of IQ6_K: a cubic polynomial, in three fused operations of f32.

    Each is exact in float64 before it is rounded: a number below 64 times 24 bits, and a sum of two
    whose lowest bits are less than 2^40 apart.
    """
    code = np.arange(64, dtype=np.float64)
    entry = np.full(64, 0.0011972, np.float32)
    for coefficient in (-0.11218, 6.2568, -127.0):
        entry = (code * entry + np.float64(np.float32(coefficient))).astype(np.float32)
    return entry


_SIX = _cubic()
_LINEAR_SIX, _LINEAR_EIGHT = np.arange(-32, 32), np.arange(-128, 128)
# Sums of the four bytes of a number in a sequence, and a zero whose sign bit is set.
_SUMS = np.array([*range(-126, 127), -0.0], np.float32)
_NEGATIVE_ZERO = 253
_FACTOR = np.uint32(0xCBAC1FED)


@dataclass(frozen=True)
class Parts:
    """What blocks are made of, d apart.

    Attributes
    ----------
    codes
        [blocks, columns].
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
        Of a block in ktk, its d included.
    table
        What codes stand for, unless their group is shifted.
    shift
        What is added to entries of shifted groups.
    parts
        Takes the bytes of blocks behind d, [blocks, nbytes - size of d], apart.
    d
        "<f2" or "<f4".
    row_prefix
        Bytes of a row in a file before its first block, d first; 0: each block has its own.
    columns
        Values of a block.
    """

    name: str
    number: int
    nbytes: int
    table: npt.NDArray[np.int64] | npt.NDArray[np.float32]
    shift: int
    parts: Callable[[Bytes], Parts]
    d: str = "<f2"
    row_prefix: int = 0
    columns: int = _COLUMNS

    @property
    def d_nbytes(self) -> int:
        """Bytes of d."""
        return np.dtype(self.d).itemsize

    @property
    def file_nbytes(self) -> int:
        """Bytes of a block in a file."""
        return self.nbytes - self.d_nbytes if self.row_prefix else self.nbytes

    def row_nbytes(self, columns: int) -> int:
        """Return the bytes of a row in a file."""
        return self.row_prefix + columns // self.columns * self.file_nbytes

    def blocks_of(self, rows: Bytes) -> Bytes:
        """Turn rows of a file, [n, bytes], into rows of blocks that have a d each."""
        if self.row_prefix == 0:
            return rows
        stored = rows[:, self.row_prefix :].reshape(len(rows), -1, self.file_nbytes)
        blocks = np.empty((*stored.shape[:2], self.nbytes), np.uint8)
        blocks[:, :, : self.d_nbytes] = rows[:, np.newaxis, : self.d_nbytes]
        blocks[:, :, self.d_nbytes :] = stored
        return blocks.reshape(len(rows), -1)

    def values(self, rows: Bytes) -> npt.NDArray[np.float32]:
        """Return what rows of blocks mean, f32 [n, k], rounded where ik_llama.cpp rounds."""
        blocks = rows.reshape(-1, self.nbytes)
        d = blocks[:, : self.d_nbytes].copy().view(self.d).astype(np.float32)
        parts = self.parts(blocks[:, self.d_nbytes :])
        group = self.columns // parts.sub.shape[1]
        entries = self.table[parts.codes]
        if self.shift:
            entries = entries + self.shift * np.repeat(parts.shifted, group, axis=1)
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


def _not_shifted(codes: Ints, sub: Ints) -> Parts:
    return Parts(codes, sub, np.zeros_like(sub))


def _one(block: Bytes) -> Ints:
    """Return the scales of types whose blocks are one group."""
    return np.ones((len(block), 1), np.int32)


def _q6_0(block: Bytes) -> Parts:
    return _not_shifted(_strided(block[:, 8:], 4, 16) | _q6_0_high(block[:, :8]), _one(block))


def _q6_0_high(high: Bytes) -> Ints:
    """Return the upper two bits: those of values 0, 16, 8 and 24 of a block are one byte."""
    pairs = high[:, np.newaxis] >> np.array([0, 4, 2, 6])[:, np.newaxis] & 3
    bits: Ints = pairs.astype(np.int32) << 4
    return bits.reshape(len(high), -1)


def _q8_kv(block: Bytes) -> Parts:
    return _not_shifted(block.view(np.int8).astype(np.int32) + 128, _one(block))


def _iq6_k(block: Bytes) -> Parts:
    low = _strided(block[:, 18:146], 4, 32)
    high = _strided(block[:, 146:], 2, 32)
    return Parts(
        low | high << 4, block[:, 2:18].view(np.int8).astype(np.int32), _bits(block[:, :2], 1)
    )


def _sequences(seeds: Ints, length: int) -> Ints:
    """Return the sums, 0 to 252, of the numbers that follow seeds, [blocks, seeds * length]."""
    number = seeds.astype(np.uint32) + np.uint32(4096)
    found = np.empty((*seeds.shape, length), np.int32)
    for i in range(length):
        number = number * _FACTOR
        masked = number & np.uint32(0x3F3F3F3F)
        found[..., i] = masked.view(np.uint8).reshape(*number.shape, 4).sum(-1, dtype=np.int32)
    return found.reshape(len(seeds), -1)


def _twelve_bits(low: Bytes, high: Bytes) -> Ints:
    """Return bytes as the lower bits of seeds; the first half has low nibbles above them."""
    return low.astype(np.int32) | _strided(high, 4, high.shape[1]) << 8


def _iq1_kt(block: Bytes) -> Parts:
    # Bits 4 to 7 of a group's byte are the highest ones of its four seeds.
    highest = _bits(block[:, :8], 1).reshape(len(block), 8, 8)[:, :, 4:].reshape(len(block), 32)
    seeds = _twelve_bits(block[:, 8:40], block[:, 40:]) | highest << 12
    return _not_shifted(_sequences(seeds, 8), np.take(_FOUR, block[:, :8] & 15))


def _iq2_kt(block: Bytes) -> Parts:
    seeds = block[:, 4:].copy().view("<u2").astype(np.int32)
    return _not_shifted(_sequences(seeds, 8), np.take(_FOUR, _strided(block[:, :4], 4, 4)))


def _iq3_kt(block: Bytes) -> Parts:
    sums = _sequences(block[:, 4:68].copy().view("<u2").astype(np.int32), 8)
    negative = _strided(block[:, 68:], 1, 32)
    size = np.abs(sums - 126)
    codes = np.where(negative, np.where(size == 0, _NEGATIVE_ZERO, 126 - size), 126 + size)
    return _not_shifted(codes, _strided(block[:, :4], 4, 4))


def _iq4_kt(block: Bytes) -> Parts:
    # Of a group: the highest bit of all its seeds, 7 bits of its scale, and 3 bits for each seed.
    words = block[:, :32].copy().view("<u4")
    highest = words[:, :, np.newaxis] >> np.arange(8, 32, 3, dtype=np.uint32) & 7
    seeds = _twelve_bits(block[:, 32:96], block[:, 96:])
    seeds |= highest.reshape(len(block), -1).astype(np.int32) << 12
    seeds |= np.repeat((words & 1).astype(np.int32), 8, axis=1) << 15
    return _not_shifted(_sequences(seeds, 4), (words >> 1 & 127).astype(np.int32) - 64)


_ALL = (
    IkType("q6_0", 133, 26, _LINEAR_SIX, 0, _q6_0, columns=32),
    IkType("iq2_k", 137, 76, _TWO, 5, _iq2_k),
    IkType("iq3_k", 138, 110, _THREE, 4, _iq3_k),
    IkType("iq4_k", 139, 144, _FOUR, 4, _iq4_k),
    IkType("iq5_k", 140, 176, _FIVE, 2, _iq5_k),
    IkType("iq6_k", 141, 212, _SIX, 1, _iq6_k),
    IkType("iq4_ks", 144, 140, _FOUR, 4, _iq4_ks, "<f4", 4),
    IkType("iq2_ks", 145, 72, _TWO, 5, _iq2_ks, row_prefix=2),
    IkType("iq4_kss", 146, 132, _FOUR, 4, _iq4_kss, "<f4", 4),
    # Files have the sum of a row's codes behind d, for the products of another program.
    IkType("q8_kv", 151, 36, _LINEAR_EIGHT, 0, _q8_kv, "<f4", 8, columns=32),
    IkType("iq5_ks", 152, 172, _FIVE, 2, _iq5_ks, "<f4", 4),
    IkType("iq2_kt", 153, 72, _SUMS, 0, _iq2_kt, "<f4", 4),
    IkType("iq3_kt", 154, 104, _SUMS, 0, _iq3_kt, "<f4", 4),
    IkType("iq4_kt", 155, 132, _SUMS, 0, _iq4_kt, "<f4", 4),
    IkType("iq3_ks", 156, 104, _THREE, 4, _iq3_ks, row_prefix=2),
    IkType("iq2_kl", 157, 88, _THREE, 0, _iq2_kl, row_prefix=2),
    IkType("iq1_kt", 158, 60, _SUMS, 0, _iq1_kt, "<f4", 4),
)
#: By name, and by number.
TYPES = {one.name: one for one in _ALL}
NUMBERS = {one.number: one for one in _ALL}
