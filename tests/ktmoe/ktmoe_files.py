"""Checkpoints of one layer in every format that a writer for GPUs might meet."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ktk import Format
from ktk.quantize import Quantized, quantize

E, K, H, INNER = 2, 1, 256, 256
LAYER = 3
PARTS = ("gate", "up", "down")
Tensors = dict[str, torch.Tensor]


def _plain(made: Quantized) -> Tensors:
    return {".weight": made.data}


def _e4m3(suffix: str, dtype: torch.dtype = torch.float32) -> Callable[[Quantized], Tensors]:
    def tensors(made: Quantized) -> Tensors:
        assert made.scale is not None
        scale = made.scale if made.scale.dtype == torch.uint8 else made.scale.to(dtype)
        return {".weight": made.data.view(torch.float8_e4m3fn), suffix: scale}

    return tensors


def _one_scale(made: Quantized) -> Tensors:
    assert made.scale is not None
    return {".weight": made.data.view(torch.float8_e4m3fn), ".weight_scale": made.scale[:1, 0]}


def _packed(made: Quantized) -> Tensors:
    assert made.scale is not None
    return {".weight_packed": made.data.view(torch.int32), ".weight_scale": made.scale}


def _e2m1(made: Quantized) -> Tensors:
    assert made.scale is not None
    return {".weight": made.data, ".scale": made.scale}


def _modelopt(made: Quantized) -> Tensors:
    assert made.scale is not None
    assert made.factor is not None
    scale = made.scale.view(torch.float8_e4m3fn)
    return {".weight": made.data, ".weight_scale": scale, ".weight_scale_2": made.factor[0]}


def _int4(group: int, scale: str = "bf16") -> tuple[Format, Callable[[Quantized], Tensors], Any]:
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": group}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {**weights, "strategy": "group"}}},
    }
    return Format("u4", scale, "none", 1, group), _packed, config


_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
_BLOCKS = Format("e4m3", "f32", "none", 128, 128)
_ROW = Format("e4m3", "f32", "none", 1, 0)

#: What the files hold: the matrices' format, how its tensors are named, and quantization_config.
KINDS: dict[str, tuple[Format, Callable[[Quantized], Tensors], dict[str, Any] | None]] = {
    "bf16": (Format("bf16"), _plain, None),
    "f16": (Format("f16"), _plain, None),
    "f32": (Format("f32"), _plain, None),
    "fp8 by blocks": (_BLOCKS, _e4m3(".weight_scale_inv"), _FP8),
    "fp8 by rows": (_ROW, _e4m3(".weight_scale"), _ROWS),
    "fp8 by matrix": (_ROW, _one_scale, _ROWS),
    "mxfp8": (Format("e4m3", "ue8m0", "none", 1, 32), _e4m3(".weight_scale_inv"), None),
    "int4 by 32": _int4(32),
    "int4 by 128": _int4(128),
    "int4 by 256": _int4(256),
    "int4 with f16": _int4(32, "f16"),
    "mxfp4": (Format("e2m1", "ue8m0", "none", 1, 32), _e2m1, None),
    "nvfp4": (Format("e2m1", "e4m3", "none", 1, 16), _modelopt, {"quant_method": "modelopt"}),
}


@functools.cache
def made(kind: str) -> list[dict[str, Quantized]]:
    """Return the experts of a kind, as they are in its file."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}
    return [
        {
            part: quantize(torch.randn(shape, generator=generator) / 16, KINDS[kind][0])
            for part, shape in shapes.items()
        }
        for _ in range(E)
    ]


def write(folder: Path, kind: str) -> Path:
    """Write the file of a kind."""
    folder.mkdir()
    _, tensors_of, quantization = KINDS[kind]
    experts = made(kind)
    tensors = {
        f"model.layers.{LAYER}.mlp.experts.{number}.{part}_proj{suffix}": tensor.contiguous()
        for number, expert in enumerate(experts)
        for part in PARTS
        for suffix, tensor in tensors_of(expert[part]).items()
    }
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
    }
    if quantization:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def read_back(kind: str, expert: int, part: str) -> torch.Tensor:
    """Return what a matrix of a file means, in f32."""
    matrix = made(kind)[expert][part]
    if kind == "fp8 by matrix":  # the file has the first row's scale only
        assert matrix.scale is not None
        matrix = replace(matrix, scale=matrix.scale[:1].expand_as(matrix.scale))
    return matrix.dequantize(torch.float32)
