"""Decodes tensors of torchao, whose parts have names of their own in safetensors files.

Of a module's weight, ``gate_proj.weight``, there are ``gate_proj._weight_qdata``, ``_weight_scale``
and others. As torchao 0.18 has them:

    Int8Tensor, IntxUnpackedToInt8Tensor
        qdata [N, K] int8; scale, zero_point [N, 1] or [N, K/G]: (code - zero_point) * scale
    Int4Tensor
        qdata [N, K/2], two's complement, the even column in the low half; scale, zero_point
        [K/G, N]: code * scale + zero_point, which is a float
    Float8Tensor
        qdata [N, K]; scale by row, block or matrix
"""

from __future__ import annotations

import torch

from ktk._core import Format
from ktk.checkpoint.safetensors.integers import unpack
from ktk.checkpoint.safetensors.scheme import Layout, Tensors, as_bytes, decoded
from ktk.dtypes import FLOAT_NAMES
from ktk.expert import Matrix

# In both halves of a byte: turns two's complement into codes from 0.
_SIGNS = 0x88
_MIDDLE = 8


def int4(t: Tensors, layout: Layout) -> Matrix:
    """Decode an Int4Tensor, which is u4 where it has no zero points."""
    data = as_bytes(t["data"]) ^ _SIGNS
    scale = t["scale"].T.contiguous()
    if not t["zero"].any():
        return Matrix(Format("u4", FLOAT_NAMES[scale.dtype], "none", 1, layout.group), data, scale)

    def values() -> torch.Tensor:
        group = torch.arange(layout.k, device="cpu") // (layout.group or layout.k)
        codes = unpack(data, 4, layout.k).float() - _MIDDLE
        return codes * scale.float()[:, group] + t["zero"].T.float()[:, group]

    return decoded(layout, t["data"], values)
