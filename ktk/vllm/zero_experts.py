"""Routing of models with zero experts (LongCat-Flash) on CPUs, for which vLLM has no kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ktk.hosts.zero_experts import take_zero_experts


def routing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return what routes tokens on a CPU, and calls `original`, vLLM's own, elsewhere."""

    def compute(
        router: Any,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor,
        indices_type: torch.dtype | None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if hidden_states.device.type != "cpu":
            found: tuple[torch.Tensor, torch.Tensor] = original(
                router, hidden_states, router_logits, indices_type, **more
            )
            return found
        scores = _SCORES[router.scoring_func](router_logits.float())
        # The bias decides who is chosen, and is no part of the weights.
        ids = (scores + router.e_score_correction_bias).topk(router.top_k, sorted=False).indices
        weights = scores.gather(-1, ids)
        if router.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * router.routed_scaling_factor
        router._zero_expert_output = take_zero_experts(
            ids, weights, router.num_logical_experts, router.zero_expert_type, hidden_states
        )
        return weights, ids.to(indices_type or torch.int32)

    return compute


_SCORES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
}


def register() -> None:
    """Have ktk route tokens of such models on CPUs."""
    from vllm.model_executor.layers.fused_moe.router import zero_expert_router

    router = zero_expert_router.ZeroExpertRouter
    if router._compute_routing.__module__ != __name__:
        router._compute_routing = routing(router._compute_routing)
