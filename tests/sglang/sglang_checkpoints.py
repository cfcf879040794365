"""Checkpoints of two layers of experts, in every format that a method of kt-kernel reads."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import numpy as np
import schemes
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from ktk import Format
from ktk.testing import formats
from ktk.testing.formats import Source

E, TOP, H, INNER, LAYERS = 8, 2, 256, 256, 2
SHAPES = {"gate": (INNER, H), "up": (INNER, H), "down": (H, INNER)}

_INT4 = Format("u4", "bf16", "none", 1, 32)
#: kind -> format of gate, up and down, what files call their tensors, quantization_config
KINDS: dict[str, tuple[tuple[Format, ...], Callable[[Source], Any] | None, dict[str, Any]]] = {
    "bf16": ((Format("bf16"),) * 3, lambda s: {".weight": schemes.tensor(s.data)}, {}),
    "fp8 by blocks": ((schemes.BLOCK,) * 3, *schemes.SCHEMES["fp8 by blocks"][1:]),
    "fp8 by rows": ((schemes.ROW,) * 3, *schemes.SCHEMES["fp8 by rows"][1:]),
    "fp8 by tensors": (
        (schemes.ROW,) * 3,
        lambda s: {".weight": schemes.e4m3(s), ".weight_scale": schemes.tensor(s.scale)[0, 0]},
        schemes.SCHEMES["fp8 by rows"][2],
    ),
    "mxfp8": ((schemes.MXFP8,) * 3, *schemes.SCHEMES["mxfp8"][1:]),
    "int4": ((_INT4,) * 3, *schemes.SCHEMES["int4"][1:]),
    "int8": ((schemes.INT8,) * 3, *schemes.SCHEMES["int8 by rows"][1:]),
    "gptq": ((schemes.U4_ZERO,) * 3, *schemes.SCHEMES["gptq"][1:]),
    "mxfp4": ((schemes.MXFP4,) * 3, *schemes.SCHEMES["mxfp4 of DeepSeek-V4"][1:]),
    "nvfp4": ((schemes.NVFP4,) * 3, *schemes.SCHEMES["nvfp4"][1:]),
    "gguf": ((Format("q8_0"),) * 3, None, {}),
    "gguf, mixed": ((Format("q4_0"), Format("q4_0"), Format("q5_1")), None, {}),
}


@functools.cache
def sources(kind: str, layer: int) -> list[dict[str, Source]]:
    """Return the experts of a layer, as its file has them, with what they mean in float64."""
    rng = np.random.default_rng(layer)
    return [
        {
            part: with_one_scale(one) if kind == "fp8 by tensors" else one
            for (part, shape), fmt in zip(SHAPES.items(), KINDS[kind][0], strict=True)
            for one in [_source(rng, fmt, shape)]
        }
        for _ in range(E)
    ]


def _source(rng: np.random.Generator, fmt: Format, shape: tuple[int, int]) -> Source:
    values = (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)
    source = formats.make_source(fmt, values, rng)
    # GPTQ's files have one less, in four bits.
    return source if source.zero is None else schemes.clipped(source, 1, 16)


def with_one_scale(source: Source) -> Source:
    """Return a matrix by rows in which all have the scale of the first."""
    one = source.scale[:1].astype(np.float64)
    values = source.values / source.scale.astype(np.float64) * one
    return dataclasses.replace(source, scale=source.scale[:1].repeat(len(values), 0), values=values)


def config(**more: Any) -> dict[str, Any]:
    """Return what config.json says of the model."""
    return {
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_hidden_layers": LAYERS,
        "num_experts": E,
        "num_experts_per_tok": TOP,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        **more,
    }


def write(folder: Path, kind: str, **more: Any) -> Path:
    """Write a checkpoint; `more` goes to config.json."""
    folder.mkdir(exist_ok=True)
    tensors_of, quantization = KINDS[kind][1:]
    if tensors_of is None:
        return _write_gguf(folder / "model.gguf", kind)
    tensors = {
        f"model.layers.{layer}.mlp.experts.{number}.{part}_proj{suffix}": tensor.contiguous()
        for layer in range(LAYERS)
        for number, expert in enumerate(sources(kind, layer))
        for part, source in expert.items()
        for suffix, tensor in tensors_of(source).items()
    }
    save_file(tensors, folder / "model.safetensors")
    entries = config(**({"quantization_config": quantization} if quantization else {}), **more)
    (folder / "config.json").write_text(json.dumps(entries))
    return folder


def _write_gguf(path: Path, kind: str) -> Path:
    tensors: dict[str, gguf_files.Tensor] = {}
    for layer in range(LAYERS):
        experts = sources(kind, layer)
        parts = {
            part: gguf_files.Tensor(
                np.stack([expert[part].data for expert in experts]),
                GGMLQuantizationType[experts[0][part].format.element.upper()],
            )
            for part in SHAPES
        }
        tensors |= gguf_files.stacked(parts, layer)
    fields = {
        "block_count": LAYERS,
        "expert_count": E,
        "expert_used_count": TOP,
        "embedding_length": H,
        "expert_feed_forward_length": INNER,
    }
    return gguf_files.write(path, tensors, fields=fields)


def inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden states, ids and routing weights as an engine has them."""
    made = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, H, generator=made).bfloat16()
    weights, ids = torch.rand(tokens, E, generator=made).topk(TOP)
    return hidden, ids.int(), weights
