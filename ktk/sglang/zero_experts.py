"""What zero experts add in SGLang's models (LongCat-Flash) on CPUs; their kernel is for GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ktk.hosts.zero_experts import take_zero_experts


def zero_experts_compute_triton(
    original: Callable[..., torch.Tensor],
    expert_indices: torch.Tensor,
    expert_scales: torch.Tensor,
    num_experts: int,
    zero_expert_type: str,
    hidden_states: torch.Tensor,
) -> torch.Tensor:
    """Return what they add, and write 0 over their ids and weights."""
    if hidden_states.device.type != "cpu":
        return original(expert_indices, expert_scales, num_experts, zero_expert_type, hidden_states)
    return take_zero_experts(
        expert_indices, expert_scales, num_experts, zero_expert_type, hidden_states
    )
