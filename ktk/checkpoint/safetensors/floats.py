"""Decodes floats: as they are, and those of 8 and 4 bits with their scales."""

from __future__ import annotations

import torch

from ktk._core import Format
from ktk.checkpoint.safetensors.scheme import Layout, Tensors, as_bytes
from ktk.dtypes import FLOAT_NAMES
from ktk.expert import Matrix

# Columns that share a power of two in the MX formats.
_MX_COLUMNS = 32
# What kernels have scales in f32 for.
_BLOCK = (128, 128)


def plain(t: Tensors, layout: Layout) -> Matrix:
    """Decode floats without scales."""
    return Matrix(Format(FLOAT_NAMES[t["data"].dtype]), t["data"])


def fp8_blocks(t: Tensors, layout: Layout) -> Matrix:
    """Decode FP8 with a scale for each block of rows and columns.

    Powers of two (UE8M0) by smaller blocks than 128 x 128, such as the 32 x 32 of DeepSeek-V4.1,
    are MXFP8 whose scales are the same in the rows of a block.
    """
    scale, element, block = t["scale"], _fp8_element(t), layout.quantization.block
    if scale.is_floating_point() and scale.itemsize > 1:
        return Matrix(Format(element, "f32", "none", *block), as_bytes(t["data"]), scale.float())
    exponent = as_bytes(scale)
    rows, columns = block
    if block != _BLOCK and columns % _MX_COLUMNS == 0:
        repeated = exponent.repeat_interleave(rows, 0)[: layout.n]
        repeated = repeated.repeat_interleave(columns // _MX_COLUMNS, 1)
        repeated = repeated[:, : -(-layout.k // _MX_COLUMNS)].contiguous()
        return _mx_matrix(element, as_bytes(t["data"]), repeated)
    # f32 holds powers of two exactly, and its own NaN.
    wide = torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127)).float()
    return Matrix(Format(element, "f32", "none", *block), as_bytes(t["data"]), wide)


def fp8_rows(t: Tensors, layout: Layout) -> Matrix:
    """Decode FP8 with a scale for each row, or one for all, which is repeated."""
    scale = t["scale"].float().reshape(-1, 1).expand(layout.n, 1).contiguous()
    return Matrix(Format(_fp8_element(t), "f32", "none", 1, 0), as_bytes(t["data"]), scale)


def mxfp8(t: Tensors, layout: Layout) -> Matrix:
    """Decode MXFP8."""
    return _mx_matrix(_fp8_element(t), as_bytes(t["data"]), as_bytes(t["scale"]))


def mxfp4(t: Tensors, layout: Layout) -> Matrix:
    """Decode MXFP4; blocks of 16 bytes may have an axis of their own."""
    return _mx_matrix("e2m1", as_bytes(t["data"]).reshape(layout.n, -1), as_bytes(t["scale"]))


def nvfp4(t: Tensors, layout: Layout) -> Matrix:
    """Decode NVFP4 with a factor that multiplies."""
    fmt = Format("e2m1", "e4m3", "none", 1, 16)
    factor = t["factor"].reshape(1)
    return Matrix(fmt, t["data"], as_bytes(t["scale"]), factor=factor)


def nvfp4_transposed(t: Tensors, layout: Layout) -> Matrix:
    """Decode NVFP4 whose codes and scales are transposed."""
    return nvfp4({**t, "data": t["data"].T, "scale": t["scale"].T}, layout)


def nvfp4_divided(t: Tensors, layout: Layout) -> Matrix:
    """Decode NVFP4 with a factor that divides."""
    return nvfp4({**t, "factor": 1 / t["factor"]}, layout)


def _mx_matrix(element: str, data: torch.Tensor, exponent: torch.Tensor) -> Matrix:
    return Matrix(Format(element, "ue8m0", "none", 1, _MX_COLUMNS), data, exponent)


def _fp8_element(t: Tensors) -> str:
    return "e5m2" if t["data"].dtype == torch.float8_e5m2 else "e4m3"
