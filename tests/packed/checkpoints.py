"""Small checkpoints to convert, and ways to compare what became of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import ktk
from ktk import Format
from ktk.quantize import Quantized, quantize

E, K, H, I = 3, 2, 128, 512  # noqa: E741 - the names of the table of families
PARTS = ("gate", "up", "down")
Sizes = tuple[int, int, int]  # E, H, I
BLOCKS = Format("e4m3", "f32", "none", 128, 128)
ROWS = Format("i8", "f32", "none", 1, 0)
GROUPS = Format("u4", "bf16", "none", 1, 32)
MX = Format("e2m1", "ue8m0", "none", 1, 32)
NV = Format("e2m1", "e4m3", "none", 1, 16)


def config(sizes: Sizes = (E, H, I)) -> dict[str, Any]:
    """What config.json says."""
    return {
        "model_type": "qwen3_moe",
        "num_experts": sizes[0],
        "num_experts_per_tok": K,
        "hidden_size": sizes[1],
        "moe_intermediate_size": sizes[2],
    }


def weight(part: str, layer: int, expert: int, sizes: Sizes = (E, H, I)) -> torch.Tensor:
    """Random weights of a trained model's size."""
    seed = 100 * layer + 10 * expert + len(part)
    _, hidden, inner = sizes
    n, k = (hidden, inner) if part == "down" else (inner, hidden)
    generator = torch.Generator().manual_seed(seed)
    values: torch.Tensor = torch.randn(n, k, generator=generator) / k**0.5
    return values.bfloat16()


def tensors_of(matrix: Quantized) -> dict[str, torch.Tensor]:
    """Name the tensors of a matrix as the checkpoints of its format do."""
    data = matrix.data.contiguous()
    scale = matrix.scale
    if matrix.format == BLOCKS and scale is not None:
        return {".weight": data.view(torch.float8_e4m3fn), ".weight_scale_inv": scale}
    if matrix.format == ROWS and scale is not None:
        return {".weight": data, ".weight_scale": scale}
    if matrix.format == GROUPS and scale is not None:
        return {".weight_packed": data.view(torch.int32), ".weight_scale": scale}
    if matrix.format == MX and scale is not None:
        return {".weight": data, ".scale": scale}
    if matrix.format == NV:
        assert matrix.scale is not None
        assert matrix.factor is not None
        scale = matrix.scale.view(torch.float8_e4m3fn)
        return {".weight": data, ".weight_scale": scale, ".weight_scale_2": matrix.factor[0]}
    return {".weight": data}


def write(
    folder: Path,
    fmt: Format | None = None,
    layers: tuple[int, ...] = (0,),
    sizes: Sizes = (E, H, I),
) -> Path:
    """Write a model whose experts are bf16, or in a format."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        for expert in range(sizes[0]):
            for part in PARTS:
                stem = f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj"
                matrix = quantize(weight(part, layer, expert, sizes), fmt or Format("bf16"))
                tensors |= {stem + name: t for name, t in tensors_of(matrix).items()}
    (folder / "config.json").write_text(json.dumps(config(sizes)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def outputs(moe: ktk.MoE, tokens: int = 4) -> torch.Tensor:
    """What a layer makes of some tokens."""
    config = moe.config
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, config.hidden_size, generator=generator)
    logits = torch.randn(tokens, config.num_experts, generator=generator)
    weights, ids = torch.softmax(logits, dim=1).topk(config.num_experts_per_tok)
    result: torch.Tensor = moe(hidden, ids, weights)
    assert result.isfinite().all()
    assert result.abs().max() > 0
    return result


def same_weights(a: ktk.MoE, b: ktk.MoE) -> bool:
    """Whether two layers hold the same numbers, bit by bit."""
    return all(
        np.asarray(mine == theirs).all()
        for expert in range(a.config.num_experts)
        for mine, theirs in zip(a.unpack_expert(expert), b.unpack_expert(expert), strict=True)
    )


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, without the lock."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if not path.name.startswith(".")
    }
