"""Tiny random models with a tokenizer, stored as hubs have them, and what they are in float32."""

from __future__ import annotations

import copy
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import schemes
import text_models
import torch
import transformers
from quantized import in_four_bits, rewrite
from safetensors.torch import load_file, save_file

from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.conversion.compressed import convert_checkpoint
from ktk.testing import formats

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
# What vLLM wants to read in a quantization_config.
_ALSO: dict[str, dict[str, Any]] = {
    "fp8": {"activation_scheme": "dynamic"},
    "compressed-tensors": {"format": "pack-quantized", "quantization_status": "compressed"},
    "gptq": {"checkpoint_format": "gptq"},
    "awq": {"version": "gemm"},
    "modelopt": {"group_size": 16, "kv_cache_quant_algo": None},
}
# vLLM's attention on CPUs takes latent widths of 512 + 64 alone.
LONGCAT: dict[str, Any] = {
    "ffn_hidden_size": 256,
    "expert_ffn_hidden_size": 256,
    "num_layers": 2,
    "kv_lora_rank": 512,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "head_dim": 64,
    "moe_topk": 4,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "zero_expert_type": "identity",
    "routed_scaling_factor": 1.5,
}
Write = Callable[[Path], Any]


def qwen3(folder: Path) -> Any:
    """Write Qwen3-MoE in bf16; return the model in float32."""
    return _written(folder, transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig)


def stored(name: str, *also: str) -> Write:
    """Return what writes Qwen3-MoE with experts, and dense layers with these words in their names,
    in a scheme of tests/unit/schemes.py.
    """
    fmt, make, quantization = schemes.SCHEMES[name]

    def write(folder: Path) -> Any:
        return _in_codes(folder, fmt, make, quantization, also)

    return write


def converted(to: str) -> Write:
    """Return what writes Qwen3-MoE as ``ktk convert --to`` makes it of bf16."""

    def write(folder: Path) -> Any:
        source = folder.parent / f"{folder.name}, source"
        source.mkdir()
        exact = qwen3(source)
        convert_checkpoint(source, folder, to=to)
        with SafetensorsCheckpoint(folder) as checkpoint:
            for number in checkpoint.layers():
                layer = checkpoint.layer(number)
                for e in range(layer.config.num_experts):
                    for part, matrix in layer.values(e, torch.float32).matrices.items():
                        stem = f"model.layers.{number}.mlp.experts.{e}.{part}_proj"
                        _put(exact, stem, matrix.data)
        return exact

    return write


def awq(folder: Path) -> Any:
    return _in_codes(folder, schemes.U4_ZERO, schemes.awq, schemes.AWQ_CONFIG, (), most=15)


def llama4(folder: Path) -> Any:
    """Write Llama-4 in bf16, whose experts are in one tensor for each of their matrices."""
    return _written(
        folder,
        transformers.Llama4ForCausalLM,
        transformers.Llama4TextConfig,
        num_experts_per_tok=1,
        intermediate_size_mlp=256,
        interleave_moe_layer_step=1,
        attention_chunk_size=256,
        attn_temperature_tuning=False,
    )


def gpt_oss_bf16(folder: Path) -> Any:
    """Write gpt-oss in bf16, as programs that train it do."""
    kinds = ["full_attention", "sliding_attention"]
    return _written(
        folder, transformers.GptOssForCausalLM, transformers.GptOssConfig, layer_types=kinds
    )


def gpt_oss(folder: Path) -> Any:
    """Write gpt-oss as it was published: experts in MXFP4, gate and up alternating, biases."""
    exact = gpt_oss_bf16(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [one for one in tensors if one.endswith("_proj") and ".experts." in one]:
        stacked = tensors.pop(name).float().transpose(1, 2)
        sources = [formats.make_source(schemes.MXFP4, one.numpy(), rng) for one in stacked]
        data = torch.stack([torch.as_tensor(one.data) for one in sources])
        tensors[f"{name}_blocks"] = data.view(*data.shape[:2], -1, 16).contiguous()
        tensors[f"{name}_scales"] = torch.stack([torch.as_tensor(one.scale) for one in sources])
        values = torch.stack([torch.from_numpy(one.values) for one in sources])
        exact.get_parameter(name).data = values.float().transpose(1, 2).contiguous()
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    rewrite(folder, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": skipped})
    return exact


def longcat(folder: Path) -> Any:
    """Write LongCat-Flash in bf16, as it was published: zero experts have no tensors.

    Attention adds nothing: that of vLLM on CPUs is not transformers', where experts add nothing,
    either.
    """
    shared = ("vocab_size", "hidden_size", "max_position_embeddings", "num_attention_heads")
    sizes = {name: SIZES[name] for name in (*shared, "eos_token_id", "pad_token_id")}
    exact = _written(
        folder,
        transformers.LongcatFlashForCausalLM,
        lambda **_: transformers.LongcatFlashConfig(**sizes, **LONGCAT),
    )
    zero = tuple(f".experts.{LONGCAT['n_routed_experts'] + e}." for e in range(4))
    tensors = load_file(folder / "model.safetensors")
    kept = {name: one for name, one in tensors.items() if not any(e in name for e in zero)}
    assert len(kept) == len(tensors) - 2 * LONGCAT["num_layers"] * LONGCAT["zero_expert_num"]
    for name in [one for one in kept if one.endswith(".o_proj.weight")]:
        kept[name] = torch.zeros_like(kept[name])
        exact.get_parameter(name).data.zero_()
    config = json.loads((folder / "config.json").read_text())
    # vLLM asks for these; transformers always does so.
    config |= {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return exact


def _written(folder: Path, kind: Any, config: Any, **more: Any) -> Any:
    """Write a model of random weights, whose experts outweigh the rest, with its tokenizer."""
    torch.manual_seed(0)
    model = kind(config(**SIZES | more)).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.ndim > 1:
                one.normal_(std=(1.0 if ".experts." in name else 0.5) / one.shape[-1] ** 0.5)
            one.copy_(one.bfloat16())
    exact = kind(model.config).eval()
    exact.load_state_dict(model.state_dict())
    model.bfloat16().save_pretrained(folder)
    tokenizer = text_models.tokenizer()
    tokenizer.save_pretrained(folder)
    return exact


def _in_codes(
    folder: Path,
    fmt: Any,
    make: schemes.Writer,
    quantization: dict[str, Any],
    also: tuple[str, ...],
    *,
    most: int = 16,
) -> Any:
    exact = qwen3(folder)
    tensors = load_file(folder / "model.safetensors")
    rng = np.random.default_rng(0)
    skipped = ["lm_head"]
    for name in [one for one in tensors if one.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        if ".experts." not in name and not any(word in name for word in also):
            skipped.append(stem)
            continue
        values = tensors.pop(name).float().numpy()
        source = in_four_bits(formats.make_source(fmt, values, rng), most)
        tensors |= {stem + suffix: one for suffix, one in make(source).items()}
        _put(exact, stem, torch.from_numpy(source.values).float())
    method = quantization["quant_method"]
    ignored = [*skipped, *_routers(tensors)]
    said = {**quantization, "ignore": ignored, "modules_to_not_convert": ignored, **_ALSO[method]}
    rewrite(folder, tensors, said)
    return exact


def _routers(tensors: dict[str, torch.Tensor]) -> Iterator[str]:
    return (name.removesuffix(".weight") for name in tensors if name.endswith(".gate.weight"))


def _put(model: Any, stem: str, values: torch.Tensor) -> None:
    """Write a matrix into a model of transformers."""
    if ".experts." not in stem:
        model.get_submodule(stem).weight.data = values
        return
    module, _, rest = stem.partition(".experts.")
    number, _, part = rest.partition(".")
    experts = model.get_submodule(f"{module}.experts")
    with torch.no_grad():
        if part == "down_proj":
            experts.down_proj[int(number)] = values
        else:
            half = len(values) if part == "up_proj" else 0
            experts.gate_up_proj[int(number), half : half + len(values)] = values


def prompts(folder: Path) -> list[list[int]]:
    """Return ids of some prompts of unequal length."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text)["input_ids"] for text in text_models.SENTENCES]


def log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """Return those of the token behind each of `ids`, in float32."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0]
    return torch.log_softmax(logits.float(), -1)


def rounding(exact: Any, prompts: list[list[int]]) -> float:
    """Return the error of log probabilities that transformers makes in bf16: the median."""
    half = copy.deepcopy(exact).bfloat16()
    errors = []
    for ids in prompts:
        expected, found = log_probabilities(exact, ids), log_probabilities(half, ids)
        best = expected.topk(5).indices
        errors += (found - expected).gather(-1, best).abs().flatten().tolist()
    return float(statistics.median(errors))
