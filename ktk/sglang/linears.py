"""SGLang's dense layers of codes on ktk, as they are stored."""

from __future__ import annotations

import functools
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
    """Pack the layer, and let its weight go; also when tensors came again."""
    packed = layer.__dict__.get(_PACKED)
    if packed is not None and not layer.weight.numel():
        return None
    linear = _pack(method, layer)
    if linear is None:
        return original(method, layer)
    if packed is None:
        name = getattr(layer, "prefix", "") or "a dense layer"
        packed = OpLinear(linear, name)
        setattr(layer, _PACKED, packed)
        for role in ("weight", "weight_scale", "weight_scale_inv"):
            if isinstance(param := getattr(layer, role, None), torch.nn.Parameter):
                _restore_before(param, method, layer)
        say_once(f"ktk computes dense layers with {linear.backend.name}/{linear.variant}")
    else:
        packed.renewed(linear)
    return None


def _pack(method: Any, layer: Any) -> Linear | None:
    """Return the packed weight, and free it; scales are small, and stay."""
    matrix = matrix_of(method, layer)
    if matrix is None:
        return None
    n, k = layer.weight.shape
    packed = layer.__dict__.get(_PACKED)
    pool = pool_here() if packed is None else packed.linear.pool
    linear = Linear(PREFERRED[matrix.format.element][0], k, n, pool=pool).load(matrix)
    layer.weight.data = torch.empty(0, dtype=layer.weight.dtype, device="cpu")
    return linear


def _restore_before(param: Any, method: Any, layer: Any) -> None:
    """Have a loader find the weight that was packed: it may write some rows of it.

    The next call packs it again.
    """
    # A property of SGLang's parameters.
    name = "_weight_loader" if hasattr(param, "_weight_loader") else "weight_loader"
    load = getattr(param, name, None)
    if load is None:
        return

    def pack_again() -> Linear:
        linear = _pack(method, layer)
        assert linear is not None, "it was packed before"
        return linear

    @functools.wraps(load)
    def restore_and_load(*args: Any, **kwargs: Any) -> Any:
        if not layer.weight.numel():
            packed = layer.__dict__[_PACKED]
            [(codes, *_)] = packed.linear._core.exported()
            layer.weight.data = torch.from_numpy(codes).view(layer.weight.dtype)
            packed.renew(pack_again)
        return load(*args, **kwargs)

    setattr(param, name, restore_and_load)


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
