"""Small layers, whole or of one rank, and what divided ones have to return."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import ktk
from ktk.distributed import Placement

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 12, 3, 64, 96
ZERO_EXPERTS = 4


def layer(only: Collection[int] | None = None, backend: str = "AMXINT8", **sizes: int) -> ktk.MoE:
    """Return a layer with all experts, or with some."""
    config: dict[str, Any] = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "zero_expert_num": ZERO_EXPERTS,
    } | sizes
    moe = ktk.load_backend(backend).moe(**config, pool=ktk.WorkerPool(1))
    h, i = config["hidden_size"], config["intermediate_size"]
    for expert in range(config["num_experts"]):
        if only is not None and expert not in only:
            moe.leave_out(expert)
            continue
        random = torch.Generator().manual_seed(expert)
        gate, up, down = (
            torch.randn(shape, generator=random) / 8 for shape in ((i, h), (i, h), (h, i))
        )
        moe.load_expert(expert, gate, up, down)
    return moe


def write_checkpoint(folder: Path, intermediate: int = INTERMEDIATE) -> None:
    """Write a checkpoint of one layer with all experts."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "hidden_size": HIDDEN,
        "moe_intermediate_size": intermediate,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "zero_expert_num": ZERO_EXPERTS,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "gate_proj": (intermediate, HIDDEN),
        "up_proj": (intermediate, HIDDEN),
        "down_proj": (HIDDEN, intermediate),
    }
    weights = {
        f"model.layers.0.mlp.experts.{expert}.{name}.weight": torch.randn(shape).bfloat16() / 8
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    save_file(weights, folder / "model.safetensors")


def tokens(
    count: int, seed: int, dtype: torch.dtype = torch.bfloat16, k: int = TOP_K
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hidden, ids with some -1 and some of zero experts, and weights."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, HIDDEN, generator=random).to(dtype)
    ids = torch.randint(-1, EXPERTS + ZERO_EXPERTS, (count, k), generator=random)
    return hidden, ids, torch.rand(count, k, generator=random)


def computed_by(placement: Placement, ids: np.ndarray, home: int | None) -> np.ndarray:
    """Return the rank that computes each expert of each token, -1 for none, token by token.

    Zero experts are of the lowest rank that computes another, and else of the token's own.
    """
    chosen = np.full(ids.shape, -1)
    for token, of_token in enumerate(ids.tolist()):
        used = [0] * placement.ranks
        holders = [[r for r, held in enumerate(placement.experts) if e in held] for e in of_token]
        for several in (False, True):
            for column, able in enumerate(holders):
                if able and several == (len(able) > 1):
                    rank = min(able, key=lambda r: (used[r], r != home, r))
                    used[rank] += 1
                    chosen[token, column] = rank
        busy = [rank for rank, count in enumerate(used) if count]
        for column, expert in enumerate(of_token):
            if expert >= placement.num_experts:
                chosen[token, column] = min(busy, default=home or 0)
    return chosen


def in_order_of_ranks(
    whole: ktk.MoE, placement: Placement, home: int | None, call: Any
) -> torch.Tensor:
    """Return what a divided layer returns: sums of ranks, added up in f32, rank 0 first."""
    hidden, ids, weights = call
    chosen = torch.from_numpy(computed_by(placement, ids.numpy(), home))
    total, begun = torch.zeros(hidden.shape), torch.zeros(len(ids), 1, dtype=torch.bool)
    for rank in range(placement.ranks):
        mine = chosen == rank
        some = mine.any(1)[:, None]
        sums = torch.empty(hidden.shape)
        whole(hidden, torch.where(mine, ids, -1), weights, out=sums)
        total = torch.where(some, torch.where(begun, total + sums, sums), total)
        begun |= some
    return total.to(hidden.dtype)
