"""Decodes floats: as they are, and those of 8 and 4 bits with their scales."""

from __future__ import annotations

import torch

from ktk._core import Format
from ktk.checkpoint.safetensors.scheme import Layout, Tensors, as_bytes, element_name
from ktk.expert import Matrix

# Columns that share a power of two in the MX formats.
_MX_COLUMNS = 32


def plain(t: Tensors, layout: Layout) -> Matrix:
    """Decode floats without scales."""
    return Matrix(Format(element_name(t["data"].dtype)), t["data"])


def fp8_blocks(t: Tensors, layout: Layout) -> Matrix:
    """Decode FP8 with a scale for each block of rows and columns."""
    scale, block = t["scale"], layout.quantization.block
    if scale.is_floating_point() and scale.itemsize > 1:
        return Matrix(Format("e4m3", "f32", "none", *block), as_bytes(t["data"]), scale.float())
    exponent = as_bytes(scale)
    # f32 holds powers of two exactly, and its own NaN.
    wide = torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127)).float()
    return Matrix(Format("e4m3", "f32", "none", *block), as_bytes(t["data"]), wide)


def fp8_rows(t: Tensors, layout: Layout) -> Matrix:
    """Decode FP8 with a scale for each row, or one for all, which is repeated."""
    scale = t["scale"].float().reshape(-1, 1).expand(layout.n, 1).contiguous()
    return Matrix(Format("e4m3", "f32", "none", 1, 0), as_bytes(t["data"]), scale)


def mxfp8(t: Tensors, layout: Layout) -> Matrix:
    """Decode MXFP8."""
    return _mx_matrix("e4m3", as_bytes(t["data"]), as_bytes(t["scale"]))


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
