"""All weights of experts are trained by their gradients, and loaded back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import ktk

E, K, H, I, TOKENS = 4, 2, 64, 48, 40  # noqa: E741
SHAPES = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
#: Weights are the same bf16 on both sides. A gradient passes eight roundings to bf16: x, the two
#: products that are kept, h, dy, dh by way of these, and the gradients of gate and of up. Each is
#: half a unit of 8 bits at most.
ROUNDED = 8 * 2.0**-9
RATE = 10  # of descent; at 20 it overshoots


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, their routing, and what shall come out."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, H, generator=generator)
    scores = torch.rand(TOKENS, E, generator=generator)
    weights, ids = torch.softmax(scores, -1).topk(K)
    return x, ids, weights, torch.randn(TOKENS, H, generator=generator)


def layer(
    parts: dict[str, torch.Tensor], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    y = torch.zeros_like(x)
    for token, (experts, factors) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for e, factor in zip(experts, factors, strict=True):
            gate, up = parts["gate"][e] @ x[token], parts["up"][e] @ x[token]
            y[token] += factor * (parts["down"][e] @ (torch.nn.functional.silu(gate) * up))
    return y


@pytest.mark.parametrize("trained", [range(E), range(1, 3)], ids=["all", "two"])
def test_updated_weights_are_loaded_back(trained: range) -> None:
    """Master weights are the caller's, in f32; at each step the gradient is that of what is packed.

    A layer that kept the weights of before, or took those of another expert, would have the
    gradients of another function from the second step on.
    """
    x, ids, weights, target = given()
    generator = torch.Generator().manual_seed(1)
    master = {
        part: torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        for part, shape in SHAPES.items()
    }
    moe = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I
    )

    def load(experts: range) -> None:
        for e in experts:
            moe.load_expert(e, *(one[e].bfloat16() for one in master.values()))

    load(range(E))
    losses = []
    for _ in range(6):
        y, saved = moe.forward_train(x, ids, weights)
        losses.append(float((y - target).square().mean()))
        dy = 2 * (y - target) / y.numel()
        found = moe.backward(dy, x, ids, weights, saved=saved, weight_grads=trained).weights
        assert found is not None
        exact = {part: one.bfloat16().double().requires_grad_() for part, one in master.items()}
        layer(exact, x.double(), ids, weights.double()).backward(dy.double())
        for part, one in exact.items():
            assert one.grad is not None
            wanted = one.grad[trained.start : trained.stop]
            got = getattr(found, part)
            assert (got - wanted).norm() <= ROUNDED * wanted.norm(), part
            master[part][trained.start : trained.stop] -= RATE * got
        load(trained)
    for e in range(E):
        for part, got in zip(SHAPES, moe.unpack_expert(e), strict=True):
            assert torch.equal(torch.as_tensor(got), master[part][e].bfloat16().float())
    assert all(after < before for before, after in pairwise(losses)), losses
    assert losses[-1] < 0.9 * losses[0], losses
