"""Tiny models whose experts are stored as hubs have them, in schemes of tests/unit/schemes.py."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import schemes
import torch
from safetensors.torch import load_file, save_file
from schemes import SCHEMES
from tiny import FAMILIES, float32

from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.conversion.compressed import convert_checkpoint
from ktk.testing import formats


def qwen3(folder: Path, name: str) -> tuple[Path, Any]:
    """Write Qwen3-MoE with experts in a scheme; return the folder, and the model in float32."""
    return rewritten(folder, *SCHEMES[name])


def kimi_k2(folder: Path) -> tuple[Path, Any]:
    """Write what Kimi-K2-Thinking is: DeepSeek-V3 with experts in int4."""
    return rewritten(folder, *SCHEMES["int4"], family="deepseek-v3")


def awq(folder: Path) -> tuple[Path, Any]:
    return rewritten(folder, schemes.U4_ZERO, schemes.awq, schemes.AWQ_CONFIG, most=15)


def rewritten(
    folder: Path,
    fmt: Any,
    make: schemes.Writer,
    quantization: Any,
    *,
    most: int = 16,
    family: str = "qwen3-moe",
) -> tuple[Path, Any]:
    FAMILIES[family].save(folder)
    exact = float32(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for tensor in [one for one in tensors if ".experts." in one]:
        stem, _, _ = tensor.removesuffix(".weight").rpartition(".")
        part = tensor.split(".")[-2].removesuffix("_proj")
        source = in_four_bits(
            formats.make_source(fmt, tensors.pop(tensor).float().numpy(), rng), most
        )
        tensors |= {f"{stem}.{part}_proj{suffix}": one for suffix, one in make(source).items()}
        _put(exact, stem, part, torch.from_numpy(source.values).float())
    rewrite(folder, tensors, quantization)
    return folder, exact


def written_as(
    folder: Path, write: Callable[[tuple[int, int]], tuple[schemes.Tensors, Any]], config: Any
) -> tuple[Path, Any]:
    """Write Qwen3-MoE with experts and attention of random matrices, as `write` stores these.

    Routers stay floats, as packages leave them.
    """
    FAMILIES["qwen3-moe"].save(folder)
    exact = float32(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        n, k = tensors.pop(name).shape
        made, values = write((n, k))
        tensors |= {stem + suffix: tensor.contiguous() for suffix, tensor in made.items()}
        values = torch.from_numpy(values).float()
        if ".experts." in name:
            module, _, part = stem.rpartition(".")
            _put(exact, module, part.removesuffix("_proj"), values)
        else:
            exact.get_parameter(name).data = values
    rewrite(folder, tensors, config)
    return folder, exact


def converted(folder: Path, to: str, family: str) -> tuple[Path, Any]:
    """Write what ``ktk convert --to`` makes of a model; return that, and the model in float32."""
    source, output = FAMILIES[family].save(folder / "source"), folder / to
    convert_checkpoint(source, output, to=to)
    exact = float32(source)
    with SafetensorsCheckpoint(output) as checkpoint:
        for number in checkpoint.layers():
            layer = checkpoint.layer(number)
            for expert in range(layer.config.num_experts):
                for part, matrix in layer.values(expert, torch.float32).matrices.items():
                    _put(exact, f"model.layers.{number}.mlp.experts.{expert}", part, matrix.data)
    return output, exact


def gpt_oss(folder: Path) -> tuple[Path, Any]:
    """Write gpt-oss as it was published: experts in MXFP4, gate and up interleaved."""
    fmt = schemes.MXFP4
    FAMILIES["gpt-oss"].save(folder)
    exact = float32(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [one for one in tensors if one.endswith("_proj") and ".experts." in one]:
        stacked = tensors.pop(name).float().transpose(1, 2)  # [E, rows, columns]
        sources = [formats.make_source(fmt, one.numpy(), rng) for one in stacked]
        data = torch.stack([torch.as_tensor(one.data) for one in sources])
        scale = torch.stack([torch.as_tensor(one.scale) for one in sources])
        tensors[f"{name}_blocks"] = data.view(*data.shape[:2], -1, 16).contiguous()
        tensors[f"{name}_scales"] = scale.contiguous()
        values = torch.stack([torch.from_numpy(one.values) for one in sources])
        exact.get_parameter(name).data = values.float().transpose(1, 2).contiguous()
    rewrite(
        folder,
        tensors,
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]},
    )
    return folder, exact


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: Any) -> None:
    """Write other tensors to a folder, and say in config.json how they are stored."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def in_four_bits(source: formats.Source, most: int) -> formats.Source:
    """Return the matrix with zero points that a packing can hold: to 15 of AWQ, 16 of GPTQ."""
    if source.zero is None:
        return source
    zero = np.clip(source.zero, 1, most)
    moved = (source.zero.astype(float) - zero) * source.scale.astype(float)
    _, k = source.values.shape
    values = source.values + moved.repeat(source.format.group_k, axis=1)[:, :k]
    return dataclasses.replace(source, zero=zero, values=values)


def fp8_everywhere(folder: Path) -> tuple[Path, Any]:
    """Write Qwen3-MoE in FP8 by blocks, attention too, as most are published."""
    folder, exact = qwen3(folder, "fp8 by blocks")
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(1)
    for name in [one for one in tensors if ".self_attn." in one and one.endswith("_proj.weight")]:
        values = tensors.pop(name).float().numpy()
        source = formats.make_source(schemes.BLOCK, values, rng)
        made = schemes.fp8(source)
        tensors |= {name.removesuffix(".weight") + suffix: one for suffix, one in made.items()}
        exact.get_parameter(name).data = torch.from_numpy(source.values).float()
    rewrite(folder, tensors, {**schemes.FP8_CONFIG, "modules_to_not_convert": ["gate", "lm_head"]})
    return folder, exact


def _put(model: Any, stem: str, part: str, values: torch.Tensor) -> None:
    """Write one matrix of an expert into a model of transformers."""
    module, _, number = stem.rpartition(".")
    experts = model.get_submodule(module)
    with torch.no_grad():
        if part == "down":
            experts.down_proj[int(number)] = values
        else:
            half = len(values) if part == "up" else 0
            experts.gate_up_proj[int(number), half : half + len(values)] = values
