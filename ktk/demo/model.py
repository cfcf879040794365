"""Writes a small Qwen3-MoE checkpoint, in the format of a hub: config.json, shards and an index."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from ktk.checkpoint.safetensors.index import INDEX

# Experts of Qwen3-30B-A3B, a quarter of them. All together they are larger than most caches, so
# that a decode step that takes other experts than the one before reads memory.
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_SHARDS = 2


def write_checkpoint(folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint with random weights of a trained model's scale, and return `folder`."""
    generator = torch.Generator().manual_seed(seed)
    experts = int(str(CONFIG["num_experts"]))
    weight_map: dict[str, str] = {}
    size = 0
    for shard in range(_SHARDS):
        file = f"model-{shard + 1:05d}-of-{_SHARDS:05d}.safetensors"
        mine = range(shard * experts // _SHARDS, (shard + 1) * experts // _SHARDS)
        tensors = {name: tensor for e in mine for name, tensor in _expert(e, generator)}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file))
        size += sum(tensor.nbytes for tensor in tensors.values())
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2))
    return folder


def _expert(number: int, generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    hidden = int(str(CONFIG["hidden_size"]))
    inner = int(str(CONFIG["moe_intermediate_size"]))
    for part, shape in (
        ("gate", (inner, hidden)),
        ("up", (inner, hidden)),
        ("down", (hidden, inner)),
    ):
        # Unit variance in, unit variance out, as trained layers about have it.
        weight = (
            torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
            / shape[1] ** 0.5
        )
        yield f"model.layers.0.mlp.experts.{number}.{part}_proj.weight", weight.bfloat16()
