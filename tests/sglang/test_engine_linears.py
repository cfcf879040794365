"""SGLang's dense layers of codes on a CPU: what ktk's hooks load, compute, and load again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_stage
import torch
from sglang_checkpoints import H
from sglang_engine import FP8, Engine, of_quantization

import ktk
from ktk.quantize import Quantized, quantize
from ktk.testing import bounds, formats
from ktk.testing.formats import as_float64
from ktk.testing.subject import Subject


@pytest.mark.parametrize("name", ["blocks", "rows", "tensors", "int8"])
def test_dense_layers_of_codes_are_packed_and_computed(name: str, made: Engine) -> None:
    widths, k = [128, 128, 256], H
    rng = np.random.default_rng(0)
    weight = torch.from_numpy(rng.standard_normal((sum(widths), k)).astype(np.float32) / k**0.5)
    layer: Any = torch.nn.Module()
    layer.logical_widths = widths
    if name == "int8":
        method = made.int8.W8A8Int8LinearMethod(of_quantization())
        matrix = quantize(weight, "i8-f32-1x0")
        layer.weight = torch.nn.Parameter(matrix.data, requires_grad=False)
    else:
        blocks = [128, 128] if name == "blocks" else None
        method = made.fp8.Fp8LinearMethod(
            of_quantization(**{**FP8, "weight_block_size": blocks, "use_mxfp8": False})
        )
        matrix = quantize(weight, f"e4m3-f32-{'128x128' if blocks else '1x0'}")
        layer.weight = torch.nn.Parameter(
            matrix.data.view(torch.float8_e4m3fn), requires_grad=False
        )
    assert matrix.scale is not None
    scale, values = matrix.scale, matrix.dequantize(torch.float64)
    if name == "tensors":
        scale = torch.tensor([0.01, 0.02, 0.03])
        rows = scale.double().repeat_interleave(torch.tensor(widths))
        values = layer.weight.double() * rows[:, None]
    scale_name = "weight_scale_inv" if name == "blocks" else "weight_scale"
    setattr(layer, scale_name, torch.nn.Parameter(scale, requires_grad=False))
    method.process_weights_after_loading(layer)
    assert not layer.weight.numel(), "raw weights"
    x, bias = torch.randn(5, k).bfloat16(), torch.randn(sum(widths)).bfloat16()
    plain = method.apply(layer, x)
    linear = layer.ktk_linear.linear
    assert torch.equal(
        torch.from_numpy(np.asarray(linear.unpack())).double(), values.float().double()
    )
    assert torch.equal(plain, linear(x))
    assert torch.equal(method.apply(layer, x, bias), plain + bias)
    size = np.abs(as_float64(x)) @ np.abs(values.numpy()).T
    [variant] = [one for one in linear.backend.variants if one.name == linear.variant]
    act = Subject(linear.backend, variant).act_of(linear.formats[0])
    lost = formats.codec_bound(act, np.abs(as_float64(x))) @ np.abs(values.numpy()).T
    exact = as_float64(x) @ values.numpy().T
    error = lost + bounds.dot(as_float64(x), values.numpy()) + 2.0**-8 * size
    bounds.check(as_float64(plain), exact, error, name)


@pytest.mark.parametrize("finished", [False, True])
def test_dense_layers_are_packed_again_when_weights_are_updated(
    finished: bool, made: Engine, patch: pytest.MonkeyPatch, mainline: Path
) -> None:
    """By SGLang's own parameters: of an update with all tensors, and of one with some."""
    params: Any = sglang_stage.load(patch, mainline, "sglang.srt.layers.parameter")
    patch.setattr(params, "_is_cpu", False)  # where it pads, by a function that is elsewhere
    for name in ("ModelWeightParameter", "BlockQuantScaleParameter"):
        patch.setattr(made.fp8, name, getattr(params, name))
    method = made.fp8.Fp8LinearMethod(of_quantization(**{**FP8, "use_mxfp8": False}))
    layer: Any = torch.nn.Module()
    layer.tp_group = None

    def load(param: Any, loaded: torch.Tensor, first: int) -> None:
        if param is layer.weight:
            param.data[first : first + len(loaded)].copy_(loaded)
        else:
            param.load_column_parallel_weight(loaded, tp_rank=0)

    n, k = 2 * H, H
    method.create_weights(layer, k, [n], k, n, torch.bfloat16, weight_loader=load)
    x = torch.randn(5, k).bfloat16()

    def given(seed: int) -> Quantized:
        generator = torch.Generator().manual_seed(seed)
        return quantize(torch.randn(n, k, generator=generator) / k**0.5, "e4m3-f32-128x128")

    def update(matrix: Quantized, first: int, behind: int) -> None:
        codes = matrix.data.view(torch.float8_e4m3fn)
        layer.weight.weight_loader(layer.weight, codes[first:behind], first)
        scales = layer.weight_scale_inv
        scales.weight_loader(scales, matrix.scale, 0)
        if finished:
            method.process_weights_after_loading(layer)

    update(given(0), 0, n)
    method.process_weights_after_loading(layer)
    number = layer.ktk_linear.number

    def check(matrix: Quantized) -> None:
        wanted = ktk.Linear("FP8", k, n).load(matrix)
        assert torch.equal(method.apply(layer, x), wanted(x))
        assert not layer.weight.numel(), "raw weights"

    check(given(0))
    whole, other = given(1), given(2)
    update(whole, 0, n)
    check(whole)
    assert whole.scale is not None
    assert other.scale is not None
    halves = [
        torch.cat([one[: len(one) // 2], two[len(two) // 2 :]])
        for one, two in ((whole.data, other.data), (whole.scale, other.scale))
    ]
    mixed = Quantized(whole.format, *halves)
    update(mixed, n // 2, n)
    check(mixed)
    assert layer.ktk_linear.number == number, "graphs call it by this"
