"""Computes a layer of experts from tensors, and compares it with float64.

python examples/layer.py
python examples/layer.py --backend AMXINT4 --experts 64 --tokens 32
"""

from __future__ import annotations

import argparse

import torch

import ktk


def exact(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Return what the layer means, in float64: [tokens, hidden size]."""
    x = hidden.double()
    result = torch.zeros_like(x)
    for token, (ids, weights) in enumerate(zip(topk_ids, topk_weights, strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            g, u = (matrix[expert].double() @ x[token] for matrix in (gate, up))
            inner = torch.nn.functional.silu(g) * u
            result[token] += weight * (down[expert].double() @ inner)
    return result


def count(text: str) -> int:
    """Read a number from 1 on."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="BF16", help="what weights are packed for")
    parser.add_argument("--experts", type=count, default=16)
    parser.add_argument("--top-k", type=count, default=4, help="experts of a token")
    parser.add_argument("--hidden", type=count, default=256)
    parser.add_argument("--intermediate", type=count, default=128)
    parser.add_argument("--tokens", type=count, default=8)
    options = parser.parse_args()
    if options.top_k > options.experts:
        parser.error("--top-k is more than --experts")
    try:
        backend = ktk.load_backend(options.backend)
    except ktk.BackendError as error:
        parser.error(str(error))

    torch.manual_seed(0)
    experts, hidden_size, inner = options.experts, options.hidden, options.intermediate
    gate, up = (torch.randn(experts, inner, hidden_size) / hidden_size**0.5 for _ in range(2))
    down = torch.randn(experts, hidden_size, inner) / inner**0.5
    gate, up, down = gate.bfloat16(), up.bfloat16(), down.bfloat16()

    moe = backend.moe(
        num_experts=experts,
        num_experts_per_tok=options.top_k,
        hidden_size=hidden_size,
        intermediate_size=inner,
    )
    moe.load(gate, up, down)

    hidden = torch.randn(options.tokens, hidden_size).bfloat16()
    router = torch.softmax(torch.randn(options.tokens, experts), dim=1)
    topk_weights, topk_ids = router.topk(options.top_k)
    result = moe(hidden, topk_ids, topk_weights)

    wanted = exact(hidden, topk_ids, topk_weights, gate, up, down)
    error = (result.double() - wanted).norm() / wanted.norm()
    print(f"{moe.backend.name}, {moe.variant}: {moe.nbytes / 1e6:.1f} MB, error {error:.4f}")


if __name__ == "__main__":
    main()
