"""Divides the experts of a layer: some are computed elsewhere while ktk computes the others.

    python examples/two_places.py

A GPU would be elsewhere; here it is torch on this CPU, so that the example runs anywhere. ktk is
given the mask of experts that are not its own, and works while the caller does.
"""

from __future__ import annotations

import torch

import ktk

EXPERTS, TOP_K, HIDDEN, INNER, TOKENS = 8, 2, 256, 128, 16


def elsewhere(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    own: torch.Tensor,
) -> torch.Tensor:
    """Compute the experts of a mask with torch: [tokens, hidden size], f32."""
    gate, up, down = (matrix.float() for matrix in matrices)
    result = torch.zeros(hidden.shape)
    for expert in own.nonzero().flatten().tolist():
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        x = hidden[tokens].float()
        inner = torch.nn.functional.silu(x @ gate[expert].T) * (x @ up[expert].T)
        result.index_add_(0, tokens, weights[tokens, places, None] * (inner @ down[expert].T))
    return result


def main() -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(EXPERTS, INNER, HIDDEN) / HIDDEN**0.5 for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, INNER) / INNER**0.5
    matrices = (gate.bfloat16(), up.bfloat16(), down.bfloat16())
    moe = ktk.load_backend("BF16").moe(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
    )
    moe.load(*matrices)

    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    weights, ids = torch.softmax(torch.randn(TOKENS, EXPERTS), dim=1).topk(TOP_K)
    others = torch.arange(EXPERTS) < 3  # the experts that are not ktk's

    ticket = moe.submit(hidden, ids, weights, mask=others)  # returns at once
    theirs = elsewhere(hidden, ids, weights, matrices, others)
    both = ticket.wait().float() + theirs

    alone = moe(hidden, ids, weights).float()
    error = (both - alone).norm() / alone.norm()
    print(f"in two places and in one: they differ by {error:.4f}")
    assert error < 0.01  # two roundings to bf16, of parts and of the whole


if __name__ == "__main__":
    main()
