"""Small layers and their inputs."""

from __future__ import annotations

from typing import Any

import torch

import ktk

E, K, H, INNER = 8, 3, 64, 96
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def weights(seed: int = 0, hidden: int = H, inner: int = INNER) -> Three:
    made = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(E, inner, hidden, generator=made) / hidden**0.5 for _ in range(2))
    down = torch.randn(E, hidden, inner, generator=made) / inner**0.5
    return gate.bfloat16(), up.bfloat16(), down.bfloat16()


def inputs(tokens: int, seed: int = 0, hidden: int = H) -> Three:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=made).bfloat16()
    w, ids = torch.rand(tokens, E, generator=made).topk(K)
    return x, ids, w


def wrapper(layer_idx: int = 0, seed: int = 0, **options: Any) -> ktk.KTMoEWrapper:
    """Make a loaded layer."""
    arguments: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": INNER,
        "cpuinfer_threads": 2,
        "threadpool_count": 1,
        "method": "BF16",
        **options,
    }
    layer = ktk.KTMoEWrapper(layer_idx, **arguments)
    sizes = arguments["hidden_size"], arguments["moe_intermediate_size"]
    layer.load_weights_from_tensors(*weights(seed, *sizes))
    return layer
