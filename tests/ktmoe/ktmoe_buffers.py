"""What an engine's buffers are to hold, and buffers of exactly that size between guards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ktk.quantize import Quantized

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
GUARD = 1 << 16  # bytes on either side: more than any of the matrices of these tests is too long
FILL = 0xA5


def raw(tensor: torch.Tensor) -> Bytes:
    """Return the rows of a matrix as bytes."""
    rows = tensor.contiguous().view(torch.uint8)
    return rows.reshape(tensor.shape[0], -1).numpy()


def wanted(parts: Mapping[str, Quantized], ranks: int, rank: int) -> tuple[Bytes | None, ...]:
    """Cut the checkpoint's own arrays for a GPU, by the definition: w13, its scale, w2, its."""
    inner = len(parts["gate"].data)
    per = inner // ranks

    def rows(matrix: torch.Tensor) -> torch.Tensor:
        unit = len(matrix) * per // inner
        return matrix[rank * unit : (rank + 1) * unit]

    def columns(matrix: torch.Tensor) -> torch.Tensor:
        if matrix.shape[1] == 1:
            return matrix
        unit = matrix.shape[1] * per // inner
        return matrix[:, rank * unit : (rank + 1) * unit]

    w13 = torch.cat([rows(parts["gate"].data), rows(parts["up"].data)])
    w2 = columns(parts["down"].data)
    stored = parts["gate"].format
    if stored.scale == "none":
        return raw(w13), None, raw(w2), None
    scales = {name: matrix.scale for name, matrix in parts.items() if matrix.scale is not None}
    if stored.scale == "e4m3":
        # kt-kernel keeps the product with the factor, in bf16.
        for name, codes in scales.items():
            number = codes.view(torch.float8_e4m3fn).float()
            factor = parts[name].factor
            assert factor is not None
            scales[name] = (number * factor.reshape(())).bfloat16()
    elif stored.element == "e2m1":
        # Engines stage these as bf16.
        scales = {n: torch.exp2(s.double() - 127).bfloat16() for n, s in scales.items()}
    w13_scale = torch.cat([rows(scales["gate"]), rows(scales["up"])])
    return raw(w13), raw(w13_scale), raw(w2), raw(columns(scales["down"]))


class Guarded:
    """The buffers of some GPUs, each exactly as long as `sizes` say; None where there is none."""

    def __init__(self, sizes: list[list[int | None]]) -> None:
        self.memory = [
            [None if n is None else np.full(n + 2 * GUARD, FILL, np.uint8) for n in rank]
            for rank in sizes
        ]

    @property
    def pointers(self) -> list[list[int]]:
        """The four lists of addresses that an engine passes."""
        at = [[0 if m is None else m.ctypes.data + GUARD for m in rank] for rank in self.memory]
        return [list(column) for column in zip(*at, strict=True)]

    def contents(self) -> list[list[Bytes | None]]:
        """Return what was written; fails if it was written beyond an end."""
        for rank in self.memory:
            for buffer in rank:
                if buffer is not None:
                    assert (buffer[:GUARD] == FILL).all(), "written before the beginning"
                    assert (buffer[-GUARD:] == FILL).all(), "written beyond the end"
        return [[None if m is None else m[GUARD:-GUARD] for m in rank] for rank in self.memory]

    def untouched(self) -> bool:
        """Whether nothing was written at all."""
        return all(m is None or bool((m == FILL).all()) for rank in self.memory for m in rank)
