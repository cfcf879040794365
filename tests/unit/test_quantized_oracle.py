"""Quantised checkpoints by their published packings, against transformers' own blocks in float64.

Fine-grained FP8, GPTQ, AWQ and the blocks of gpt-oss are written by programs that need a GPU or a
whole model: their tensors are made here, and gpt-oss is decoded by transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_blocks import (
    EXPERTS,
    LAYER,
    SIZES,
    Block,
    Weights,
    block,
    check,
    each_size,
    gpt_oss,
    qwen3,
    transformers,
)
from safetensors.torch import save_file

import ktk
from ktk import Format
from ktk.quantize import quantize


def save(folder: Path, made: Block, tensors: dict[str, torch.Tensor], **entries: Any) -> None:
    made.model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": entries}))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )


def expert_name(expert: int, part: str) -> str:
    return f"model.layers.{LAYER}.mlp.experts.{expert}.{part}_proj"


@each_size
def test_fine_grained_fp8(size: tuple[int, int], tmp_path: Path) -> None:
    """The tensors of DeepSeek-V3: E4M3, and in f32 what to multiply each 128 x 128 with."""
    made = block(qwen3, size)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[Weights] = []
    for e, expert in enumerate(made.weights):
        meant.append({})
        for part, weight in expert.items():
            q = quantize(weight, Format("e4m3", "f32", "none", 128, 128))
            assert q.scale is not None
            codes = q.data.view(torch.float8_e4m3fn)
            tensors[expert_name(e, part) + ".weight"] = codes
            tensors[expert_name(e, part) + ".weight_scale_inv"] = q.scale
            n, k = weight.shape
            spread = q.scale.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
            meant[e][part] = codes.double() * spread[:, :k]
    save(tmp_path, made, tensors, quant_method="fp8", weight_block_size=[128, 128])
    check(tmp_path, made, meant, ("FP8", "AMXFP8"))


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    """GPTQ's packing: bits 4 i of word r hold row 8 r + i."""
    words = torch.zeros(codes.shape[0] // 8, codes.shape[1], dtype=torch.int64)
    for i in range(8):
        words |= codes[i::8].long() << 4 * i
    return words.to(torch.int32)


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """AWQ's packing: bits 4 i of word c hold column 8 c + order[i]."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, column::8].long() << 4 * i
    return words.to(torch.int32)


@pytest.mark.slow
@each_size
@pytest.mark.parametrize("method", ["gptq", "gptq_v2", "gptq symmetric", "awq"])
def test_gptq_and_awq(method: str, size: tuple[int, int], tmp_path: Path) -> None:
    made = block(qwen3, size)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[Weights] = []
    symmetric = method == "gptq symmetric"
    for e, expert in enumerate(made.weights):
        meant.append({})
        for part, weight in expert.items():
            groups = weight.double().unflatten(1, (-1, 32))
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            if symmetric:
                high = torch.maximum(high, -low)
                low = -high
            scale = ((high - low) / 15).half()
            zero = torch.round(-low / scale.double()).clamp(1, 15).long()
            zero = torch.full_like(zero, 8) if symmetric else zero
            codes = torch.round(groups / scale.double()[..., None]) + zero[..., None]
            codes = codes.clamp(0, 15).long()
            exact = (codes - zero[..., None]) * scale.double()[..., None]
            meant[e][part] = exact.flatten(1)
            name, codes = expert_name(e, part), codes.flatten(1).T
            tensors[name + ".scales"] = scale.T
            if method == "awq":
                tensors[name + ".qweight"] = awq_words(codes)
                tensors[name + ".qzeros"] = awq_words(zero.T)
            else:
                stored = zero if method == "gptq_v2" else zero - 1
                tensors[name + ".qweight"] = gptq_words(codes)
                tensors[name + ".qzeros"] = gptq_words(stored).T
                tensors[name + ".g_idx"] = torch.arange(len(codes), dtype=torch.int32) // 32
    config: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config |= {"desc_act": False, "sym": symmetric, "checkpoint_format": method.split()[0]}
    if method == "awq":
        config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    save(tmp_path, made, tensors, **config)
    names = ("AMXINT4", "GPTQ_INT4", "RAWINT4") if symmetric else ("AMXINT4", "AWQ_INT4")
    check(tmp_path, made, meant, names)


@each_size
def test_blocks_of_gpt_oss(size: tuple[int, int], tmp_path: Path) -> None:
    """What transformers decodes: 16 bytes to a block of 32, gate and up in turn, biases."""
    made = block(gpt_oss, size)
    prefix = f"model.layers.{LAYER}.mlp.experts."
    fmt = Format("e2m1", "ue8m0", "none", 1, 32)
    stacks: dict[str, list[torch.Tensor]] = {}
    for expert in made.weights:
        both = torch.stack([expert["gate"], expert["up"]], dim=1).flatten(0, 1)
        for part, weight in {"gate_up": both, "down": expert["down"]}.items():
            q = quantize(weight, fmt)
            assert q.scale is not None
            blocks = q.data.unflatten(1, (-1, 16))
            stacks.setdefault(f"{prefix}{part}_proj_blocks", []).append(blocks)
            stacks.setdefault(f"{prefix}{part}_proj_scales", []).append(q.scale)
    tensors = {name: torch.stack(stack) for name, stack in stacks.items()}
    # [E, K, N], as the model multiplies.
    decode = transformers.integrations.mxfp4.convert_moe_packed_tensors
    both, down = (
        decode(
            tensors[f"{prefix}{part}_proj_blocks"],
            tensors[f"{prefix}{part}_proj_scales"],
            dtype=torch.float64,
        )
        for part in ("gate_up", "down")
    )
    meant = [
        {"gate": both[e, :, ::2].T, "up": both[e, :, 1::2].T, "down": down[e].T}
        for e in range(EXPERTS)
    ]
    biases = {}
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        bias = getattr(made.experts, name)
        with torch.no_grad():
            bias.copy_(torch.randn(bias.shape).bfloat16())
        tensors[prefix + name] = bias.detach().bfloat16()
        biases[name] = bias.detach().numpy()
    save(tmp_path, made, tensors, quant_method="mxfp4")
    both_bias, down_bias = biases["gate_up_proj_bias"], biases["down_proj_bias"]
    check(
        tmp_path,
        made,
        meant,
        ("MXFP4",),
        biases=[
            {
                "gate_bias": both_bias[e, ::2],
                "up_bias": both_bias[e, 1::2],
                "down_bias": down_bias[e],
            }
            for e in range(EXPERTS)
        ],
        activation="swigluoai",
        activation_limit=7.0,
    )


def test_a_backend_that_cannot_store_what_is_asked_for_says_so(tmp_path: Path) -> None:
    made = block(qwen3, SIZES[0])
    tensors = {
        expert_name(e, part) + ".weight": weight
        for e, expert in enumerate(made.weights)
        for part, weight in expert.items()
    }
    save(tmp_path, made, tensors)
    with pytest.raises(ktk.CheckpointFormatError) as caught:
        ktk.MoE.from_checkpoint(tmp_path, LAYER, "MXFP4", weight_format=ktk.Format("bf16"))
    first = f"tensor {expert_name(0, 'gate')}.weight in {tmp_path / 'model.safetensors'}"
    message = f"{first}: MXFP4 does not take weights in bf16; it takes e2m1"
    assert message in str(caught.value)
    assert str(caught.value).endswith("gate: MXFP4 does not store weights as bf16")
