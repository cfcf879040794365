"""Reads HQQ (half-quadratic quantisation): integers of 1 to 8 bits with zero points in floats.

A matrix [n, k] is reshaped to groups before its codes are packed: one group in a row (axis 1), or
in a column (axis 0). Packing puts rows that are far from each other into one word, the first of
them in the highest bits. Of 4 bits, with R rows of codes:

    W_q      [R/2, columns]   | row 0, row R/2 | row 1, row R/2 + 1 | ...
    scale, zero               [R, 1] of axis 1, [1, columns] of axis 0

Of 3 bits, ten rows share an int32. What is no tensor is stored as one: a number, or the letters of
a string. A value is ``(code - zero) * scale``. As hqq 0.2.8 has it; Badri and Shaji,
"Half-Quadratic Quantization of Large Machine Learning Models", 2023. What a matrix becomes:

    1 to 4 bits, axis 1      u4, with scales and zero points as they are, of f16 or of bf16; or of
                             f32, if each of them is a bf16 or each an f16
    anything else            decoded
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ktk._core import Format
from ktk.checkpoint.dtypes import NAMES
from ktk.checkpoint.safetensors.integers import pack_u4
from ktk.checkpoint.safetensors.scheme import (
    FLOAT,
    Header,
    Layout,
    StorageError,
    Tensors,
    Told,
    decoded,
    header_of,
)
from ktk.dtypes import DTYPES, FLOAT_NAMES
from ktk.expert import Matrix

# By name of the packing: bits of a code, codes of a word, and the word.
_PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}
# What backends have scales and zero points in. Few f16 are bf16, most bf16 of this size are f16: in
# this order, matrices of one file agree.
_KINDS = {NAMES[element]: DTYPES[element] for element in ("bf16", "f16")}


def tell(
    headers: Mapping[str, Header], layout: Layout, read: Callable[[str], torch.Tensor]
) -> Told:
    """Say what a matrix is kept as, by the shapes of its tensors; of f32 alone values are read.

    Shapes that contradict each other are refused when the matrix is read.
    """
    n, k = layout.n, layout.k
    data, scale, zero = (headers[role] for role in ("data", "scale", "zero"))
    if len(scale.shape) != 2 or scale.shape != zero.shape:
        return Told(FLOAT, "whose groups share a scale or a zero point")
    if scale.shape[1] != 1:
        return Told(FLOAT, "whose groups run down columns")
    rows = scale.shape[0]
    group = n * k // max(rows, 1)
    if n * k != rows * group or k % max(group, 1) or k % 2:
        return Told(FLOAT, "whose groups do not divide rows")
    if data.shape[0] >= rows:  # a word holds one code
        return Told(FLOAT, "whose codes have more than 4 bits")
    if scale.dtype == zero.dtype and scale.dtype in _KINDS:
        kind = _KINDS[scale.dtype]
    else:
        wide = [read(role).float() for role in ("scale", "zero")]
        fitting = [
            kind
            for kind in _KINDS.values()
            if all(torch.equal(one.to(kind).float(), one) for one in wide)
        ]
        if not fitting:
            return Told(FLOAT, "whose scales or zero points are exact in neither bf16 nor f16")
        kind = fitting[0]
    name = FLOAT_NAMES[kind]
    return Told(Format("u4", name, name, 1, group if "group" in headers else 0))


def hqq(t: Tensors, layout: Layout) -> Matrix:
    """Return a matrix of HQQ as `tell` says."""
    n, k = layout.n, layout.k
    if t["shape"].tolist() != [n, k]:
        raise StorageError(f"is a matrix of {t['shape'].tolist()}, but config.json means {[n, k]}")
    fmt, _ = tell({role: header_of(one) for role, one in t.items()}, layout, t.__getitem__)
    rows, bits, codes_of_word, word = _packing(t, layout)
    by_group = (rows, 1) if int(t["axis"]) == 1 else (1, n * k // rows)
    for what in ("scale", "zero"):
        if tuple(t[what].shape) != by_group and t[what].numel() != 1:
            raise StorageError(f"has {what} of shape {list(t[what].shape)}, not by group")

    def codes() -> torch.Tensor:
        words = t["data"].view(word)
        places = range(bits * (codes_of_word - 1), -1, -bits)
        return torch.cat([words >> place & (1 << bits) - 1 for place in places])[:rows]

    if fmt == FLOAT:

        def values() -> torch.Tensor:
            steps = codes().float() - t["zero"].float()
            return (steps * t["scale"].float()).reshape(n, k)

        return decoded(layout, t["data"], values)
    if t["data"].is_meta:
        data = torch.empty(n, k // 2, dtype=torch.uint8, device="meta")
    elif bits == 4 and t["data"].shape[1] * t["data"].itemsize % 2 == 0:
        data = _neighbors(t["data"])[:rows].reshape(n, k // 2)
    else:
        data = pack_u4(codes().reshape(n, k).to(torch.uint8))
    kind = DTYPES[fmt.scale]
    scale, zero = (t[what].reshape(n, -1).to(kind) for what in ("scale", "zero"))
    return Matrix(fmt, data, scale, zero)


def _neighbors(words: torch.Tensor) -> torch.Tensor:
    """Return codes of 4 bits with those of neighboring columns in one byte, without unpacking them.

    Of two words that lie side by side, read as one of 16 bits:

        | b0 a0 | b1 a1 |    row r has a, row r + R/2 has b; low half of a byte first
        | a0 a1 |            of row r
        | b0 b1 |            of row r + R/2
    """
    two = words.view(torch.int16)
    first, second = two >> 4 & 0x0F | two >> 8 & 0xF0, two & 0x0F | two >> 4 & 0xF0
    return torch.cat([first, second]).to(torch.uint8)


def _packing(t: Tensors, layout: Layout) -> tuple[int, int, int, torch.dtype]:
    """Return the rows that codes are reshaped to, the bits of one, codes of a word, and the word.

    Raises
    ------
    StorageError
        The words are more or fewer than that makes.
    """
    n, k = layout.n, layout.k
    name = bytes(t["packing"].tolist()).decode(errors="replace")
    if name not in _PACKINGS:
        raise StorageError(f"is packed as {name!r}; ktk reads {', '.join(_PACKINGS)} of HQQ")
    bits, codes_of_word, word = _PACKINGS[name]
    axis = int(t["axis"])
    if axis not in (0, 1):
        raise StorageError(f"has groups along axis {axis}, expected 0 or 1")
    words, columns = t["data"].shape[0], t["data"].shape[1] * t["data"].itemsize
    if columns % word.itemsize:
        raise StorageError(f"has rows that are no whole words of {name}")
    columns //= word.itemsize
    group = int(t["group"]) if "group" in t else (n, k)[axis]
    rows = group if axis == 0 else n * k // max(group, 1)
    if group < 1 or rows * columns != n * k or words != -(-rows // codes_of_word):
        count = words * codes_of_word * columns
        raise StorageError(f"has {count} codes in groups of {group}, and is a matrix of {[n, k]}")
    if "nbits" in t and float(t["nbits"]) > bits:
        raise StorageError(f"has codes of {float(t['nbits']):g} bits, but is packed as {name}")
    return rows, bits, codes_of_word, word
