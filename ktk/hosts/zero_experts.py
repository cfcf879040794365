"""Zero experts, which return what goes in, where hosts add them beside the layer of experts.

vLLM and SGLang compute what they add by a Triton kernel, which CPUs do not run, and then put an
expert of weight zero into the place of each.
"""

from __future__ import annotations

import torch


def take_zero_experts(
    ids: torch.Tensor, weights: torch.Tensor, num_experts: int, kind: str, hidden: torch.Tensor
) -> torch.Tensor:
    """Compute what zero experts add, and take them from the routing.

    Parameters
    ----------
    ids : tensor of integers [tokens, k]
        Those from `num_experts` on name zero experts. In the place of each, 0 is written.
    weights : tensor of floats [tokens, k]
        In the place of the zero experts', 0 is written.
    num_experts
        How many experts are not zero experts.
    kind
        What a zero expert does: "identity".
    hidden : tensor [tokens, hidden_size]
        What goes in.

    Returns
    -------
    tensor [tokens, hidden_size]
        Each row times the weights of the zero experts that it names, rounded once, as `hidden`.

    Raises
    ------
    ValueError
        Zero experts are of another kind.
    """
    if kind != "identity":
        raise ValueError(f"ktk computes zero experts of the type 'identity', got {kind!r}")
    zero = ids >= num_experts
    factor = torch.where(zero, weights, 0).sum(-1, keepdim=True, dtype=torch.float32)
    ids[zero] = 0
    weights[zero] = 0
    return (hidden.float() * factor).to(hidden.dtype)


def without_weightless(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ids with -1, which costs nothing, where an expert would be multiplied with 0.

    LongCat-Flash names zero experts for a third of all ids, and each would be a row of expert 0.
    """
    return ids.masked_fill(weights == 0, -1)
