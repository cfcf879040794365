"""Decodes AWQ's three packings of 4-bit codes, by the names of the kernels they are made for.

gemm
    Words of codes run along N, the columns of eight in an order:

        qweight [K, N/8]    | c0 c2 c4 c6 c1 c3 c5 c7 |         the lowest bits first
        qzeros  [K/G, N/8]  the same; scales [K/G, N]

gemv
    Words of codes run along K, in order. Scales and zero points have columns to spare:

        qweight [N, K/8]    | c0 c1 c2 c3 c4 c5 c6 c7 |
        qzeros  [N, Z]      the same; scales [N, 8 Z]

gemv_fast
    Words of 16 bits; 64 of them hold 64 columns of four rows, row by row. Of each 32 columns:

        qweight [N/4, K]    | c0 c8 c16 c24 | c1 c9 c17 c25 | ... | c7 c15 c23 c31 |
        scales  [8 Z, N]    qzeros [8 Z, N] = -scale * zero, in f16

As AutoAWQ 0.2.9 has them. A value is ``(code - zero) * scale``.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ktk.checkpoint.safetensors.integers import integers, pack_u4, unpack, zeros
from ktk.checkpoint.safetensors.scheme import Layout, StorageError, Tensors, as_bytes
from ktk.expert import Matrix

_BITS = 4
_MOST = (1 << _BITS) - 1
# Where column i of eight is in a word of gemm.
_GEMM_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def gemm(t: Tensors, layout: Layout) -> Matrix:
    """Decode the packing for products of matrices."""
    layout = _checked(layout)
    data = pack_u4(_gemm_columns(t["data"], layout.n).T.to(torch.uint8))
    zero = zeros(layout, _gemm_columns(t["zero"], layout.n))
    return integers(layout, data, t["scale"].T, zero)


def gemv(t: Tensors, layout: Layout) -> Matrix:
    """Decode the packing for products with a vector."""
    layout = _checked(layout)
    groups = -(-layout.k // (layout.group or layout.k))
    zero = zeros(layout, unpack(as_bytes(t["zero"]), _BITS, groups).T)
    return integers(layout, as_bytes(t["data"]), t["scale"][:, :groups], zero)


def gemv_fast(t: Tensors, layout: Layout) -> Matrix:
    """Decode the packing for products with a vector on newer GPUs.

    Raises
    ------
    StorageError
        Zero points are none: their products with the scales are not those that AutoAWQ stores, or
        they are no codes; or the sizes are none that it has.
    """
    layout = _checked(layout)
    if layout.n % 4 or layout.k % 64:
        raise StorageError("has rows or columns to spare, which gemv_fast does not")
    groups = -(-layout.k // (layout.group or layout.k))
    scale, product = t["scale"][:groups], t["zero"][:groups].float()
    zero = torch.where(scale == 0, 0, torch.round(-product / scale.float()))
    if not torch.equal((-scale.float() * zero).half().float(), product):
        raise StorageError("has zero points that are no whole codes; ktk reads AWQ's own only")
    least, most = zero.min().item(), zero.max().item()
    if least < 0 or most > _MOST:
        raise StorageError(f"has zero points {least:g} to {most:g}, expected codes of 0 to {_MOST}")
    codes = unpack(as_bytes(t["data"]), _BITS, 4 * layout.k)
    rows = codes.reshape(layout.n // 4, -1, 4, 64).transpose(1, 2)
    straight = rows.reshape(-1, 8, 4).transpose(1, 2)
    data = pack_u4(straight.reshape(layout.n, layout.k))
    return integers(layout, data, scale.T, zeros(layout, zero))


def _gemm_columns(words: torch.Tensor, count: int) -> torch.Tensor:
    codes = torch.stack([words >> 4 * place & 15 for place in _GEMM_PLACE], dim=-1).flatten(-2)
    return codes[:, :count]


def _checked(layout: Layout) -> Layout:
    if layout.bits != _BITS:
        raise StorageError(f"is AWQ of {layout.bits} bits; ktk reads AWQ of {_BITS}")
    return replace(layout, bits=_BITS)
