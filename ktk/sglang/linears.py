"""SGLang's dense layers of codes on ktk, as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ktk._core import Format
from ktk.hosts.linear import OpLinear
from ktk.linear import Linear
from ktk.names import PREFERRED
from ktk.quantize import Quantized
from ktk.sglang.choice import say_once
from ktk.sglang.place import pool_here

_PACKED = "ktk_linear"
_ROWS = Format("e4m3", "f32", "none", 1, 0)
_INT8 = Format("i8", "f32", "none", 1, 0)


def matrix_of(method: Any, layer: Any) -> Quantized | None:
    """Return the weight of a layer as it was loaded; None if ktk does not compute it so."""
    weight = layer.weight.data
    n = weight.shape[0]
    if weight.dtype == torch.int8:
        return Quantized(_INT8, weight, layer.weight_scale.data.float().reshape(n, 1))
    if weight.dtype != torch.float8_e4m3fn or getattr(method, "use_mxfp8", False):
        return None
    codes = weight.view(torch.uint8)
    if method.block_quant:
        rows, columns = method.quant_config.weight_block_size
        scale = layer.weight_scale_inv.data.float()
        # Of parts whose rows do not fill blocks, the next part begins a block of its own.
        if any(width % rows for width in layer.logical_widths[:-1]):
            return None
        return Quantized(Format("e4m3", "f32", "none", rows, columns), codes, scale)
    scale = layer.weight_scale.data.float().flatten()
    widths = torch.tensor(layer.logical_widths, device="cpu")
    each = scale if scale.numel() == n else scale.expand(len(widths)).repeat_interleave(widths)
    return Quantized(_ROWS, codes, each.reshape(n, 1))


def process_weights_after_loading(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Pack the layer, and let its tensors go."""
    if _PACKED in layer.__dict__:
        return None
    matrix = matrix_of(method, layer)
    if matrix is None:
        return original(method, layer)
    n, k = layer.weight.shape
    name = getattr(layer, "prefix", "") or "a dense layer"
    linear = Linear(PREFERRED[matrix.format.element][0], k, n, pool=pool_here()).load(matrix)
    setattr(layer, _PACKED, OpLinear(linear, name))
    for role in ("weight", "weight_scale", "weight_scale_inv"):
        if isinstance(param := getattr(layer, role, None), torch.nn.Parameter):
            param.data = torch.empty(0, dtype=param.dtype, device="cpu")
    say_once(f"ktk computes dense layers with {linear.backend.name}/{linear.variant}")
    return None


def apply(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute rows."""
    packed = layer.__dict__.get(_PACKED)
    if packed is None:
        return original(method, layer, x, bias)
    width = packed.linear.out_features
    result: torch.Tensor = torch.ops.ktk.linear(x, packed.number, width)
    return result if bias is None else result + bias
