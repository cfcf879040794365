"""Tokens and where they go: random, each token to different experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktk.checkpoint.config import ExpertConfig


@dataclass(frozen=True)
class Batch:
    """Arguments of one call of a `MoE`."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor

    @property
    def hits(self) -> int:
        """Number of different experts in it."""
        return len(set(self.ids.flatten().tolist()))


def batches(config: ExpertConfig, tokens: int, count: int, *, seed: int = 1) -> list[Batch]:
    """Make `count` calls of `tokens` tokens each.

    Over the calls every expert is taken equally often, so that calls in a row do not find their
    weights in a cache.
    """
    generator = torch.Generator().manual_seed(seed)
    top = config.num_experts_per_tok
    rows = count * tokens
    # Permutations one after the other, cut into rows; a row that spans two may repeat an expert.
    order = [
        torch.randperm(config.num_experts, generator=generator, device="cpu")
        for _ in range(-(-rows // max(config.num_experts // top, 1)))
    ]
    whole = config.num_experts // top * top
    ids = torch.cat([permutation[:whole] for permutation in order])[: rows * top]
    ids = ids.reshape(count, tokens, top)
    hidden = torch.randn(
        count, tokens, config.hidden_size, generator=generator, dtype=torch.float32, device="cpu"
    ).bfloat16()
    weights = torch.rand(
        count, tokens, top, generator=generator, dtype=torch.float32, device="cpu"
    ).softmax(-1)
    return [Batch(*call) for call in zip(hidden, ids, weights, strict=True)]
