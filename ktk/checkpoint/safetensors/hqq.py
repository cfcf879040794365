"""Decodes HQQ (half-quadratic quantisation): integers of 1 to 8 bits with zero points in floats.

A matrix [n, k] is reshaped to groups before its codes are packed: one group in a row (axis 1), or
in a column (axis 0). Packing puts rows that are far from each other into one word, the first of
them in the highest bits. Of 4 bits, with R rows of codes:

    W_q      [R/2, columns]   | row 0, row R/2 | row 1, row R/2 + 1 | ...
    scale, zero               [R, 1] of axis 1, [1, columns] of axis 0

Of 3 bits, ten rows share an int32. What is no tensor is stored as one: a number, or the letters of
a string. A value is ``(code - zero) * scale``. As hqq 0.2.8 has it; Badri and Shaji,
"Half-Quadratic Quantization of Large Machine Learning Models", 2023.
"""

from __future__ import annotations

import torch

from ktk.checkpoint.safetensors.scheme import Layout, StorageError, Tensors, decoded
from ktk.expert import Matrix

# By name of the packing: bits of a code, codes of a word, and the word.
_PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
}


def sizes(shape: torch.Tensor) -> tuple[int, ...]:
    """Return rows and columns of a matrix, by its tensor `shape`."""
    extents = tuple(shape.flatten().tolist())
    if len(extents) != 2 or min(extents) < 1:
        raise StorageError(f"is {list(extents)}, which are no rows and columns")
    return extents


def hqq(t: Tensors, layout: Layout) -> Matrix:
    """Decode a matrix of HQQ."""
    n, k = layout.n, layout.k
    if t["shape"].tolist() != [n, k]:
        raise StorageError(f"is a matrix of {t['shape'].tolist()}, but config.json means {[n, k]}")
    name = bytes(t["packing"].tolist()).decode(errors="replace")
    if name not in _PACKINGS:
        raise StorageError(f"is packed as {name!r}; ktk reads {', '.join(_PACKINGS)} of HQQ")
    bits, codes_of_word, word = _PACKINGS[name]
    if t["data"].shape[1] * t["data"].itemsize % word.itemsize:
        raise StorageError(f"has rows that are no whole words of {name}")
    group = int(t["group"]) if "group" in t else k
    rows = group if int(t["axis"]) == 0 else n * k // max(group, 1)

    def values() -> torch.Tensor:
        words = t["data"].view(word)
        places = range(bits * (codes_of_word - 1), -1, -bits)
        codes = torch.cat([words >> place & (1 << bits) - 1 for place in places])[:rows]
        if codes.numel() != n * k or not 0 < group <= n * k:
            raise StorageError(
                f"has {codes.numel()} codes in groups of {group}, and is a matrix of {[n, k]}"
            )
        for what in ("scale", "zero"):
            one = {(rows, 1), (1, codes.shape[1]), ()}
            if tuple(t[what].shape) not in one and t[what].numel() != 1:
                raise StorageError(f"has {what} of shape {list(t[what].shape)}, not by group")
        return ((codes.float() - t["zero"].float()) * t["scale"].float()).reshape(n, k)

    return decoded(layout, t["data"], values)
