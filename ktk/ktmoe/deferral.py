"""Which experts of a token may finish one layer later.

Of each token's entries, those with the lowest weights are deferred; of equal weights those that
stand later, and NaN counts as the highest. Two rules say what that means for a batch:

``per-token``
    Each token for itself: exactly the given number of each.
``batch-union``
    An entry is deferred only if no token of the call has its expert among those that it keeps.
    This is kt-kernel's choice, and few experts are deferred in large batches.

`native/stream/deferral.cc` is the same for calls that run; this form is for tensors anywhere.
"""

from __future__ import annotations

import torch

POLICIES = ("per-token", "batch-union")


def check_policy(policy: str) -> str:
    """Return the name if it is one."""
    if policy not in POLICIES:
        raise ValueError(f"deferral_policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    return policy


def select_deferred(
    ids: torch.Tensor,
    weights: torch.Tensor,
    protected: int,
    num_experts: int,
    policy: str,
    zero_experts: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide ids [tokens, k] into those that stay and those that are deferred, -1 elsewhere.

    Ids outside [0, num_experts) mean nobody, and are -1 in both; but so many behind them are zero
    experts, which stay whatever their weights are.
    """
    if ids.shape != weights.shape or ids.ndim != 2:
        raise ValueError(
            f"expert ids and scores must be [tokens, k] both, got {list(ids.shape)} and "
            f"{list(weights.shape)}"
        )
    order = torch.argsort(weights, dim=1, descending=True, stable=True)
    stays = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
    stays.scatter_(1, order[:, : max(protected, 0)], True)
    valid = (ids >= 0) & (ids < num_experts)
    if policy == "batch-union":
        # One more flag than experts takes what must not be flagged.
        safe = torch.where(valid, ids, num_experts).long()
        kept = torch.zeros(num_experts + 1, dtype=torch.bool, device=ids.device)
        kept[torch.where(stays, safe, num_experts).flatten()] = True
        stays = kept[safe]
    passed = (ids >= num_experts) & (ids < num_experts + zero_experts)
    nobody = ids.new_full((), -1)
    now = torch.where((stays & valid) | passed, ids, nobody)
    return now, torch.where(~stays & valid, ids, nobody)
