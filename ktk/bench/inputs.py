"""Synthetic layers: weights, activations and routings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ktk.bench.shapes import Shape
from ktk.system import available_memory


@dataclass(frozen=True)
class ExpertWeights:
    """bf16 matrices of one expert, with f32 biases where the shape has them."""

    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


#: Distributions of weights, all of unit variance before they are scaled to a matrix.
DISTRIBUTIONS = ("gaussian", "heavy-tailed")
# Student's t with so many degrees of freedom: an excess kurtosis of 6, where the normal
# distribution has 0. The largest of 32 values is 2.8 standard deviations on average instead of 2.3,
# the largest of 2048 is 7.3 instead of 3.6.
_DEGREES = 5


def _standard(n: int, k: int, generator: torch.Generator, distribution: str) -> torch.Tensor:
    if distribution == "gaussian":
        return torch.randn(n, k, generator=generator, dtype=torch.float32, device="cpu")
    # Bailey, "Polar generation of random variates with the t-distribution", 1994: two uniforms make
    # one variate.
    u = torch.rand(n, k, generator=generator, dtype=torch.float32, device="cpu").clamp_(
        min=2.0**-24
    )
    turn = (
        torch.rand(n, k, generator=generator, dtype=torch.float32, device="cpu")
        .mul_(2 * math.pi)
        .cos_()
    )
    t = u.pow_(-2 / _DEGREES).sub_(1).mul_(_DEGREES).sqrt_().mul_(turn)
    return t.mul_(math.sqrt((_DEGREES - 2) / _DEGREES))


def random_experts(
    shape: Shape, count: int, seed: int = 0, distribution: str = "gaussian"
) -> list[ExpertWeights]:
    """Make `count` different experts whose results have the size of their inputs."""
    experts = []
    for index in range(count):
        generator = torch.Generator().manual_seed(7919 * seed + index)

        def matrix(n: int, k: int, generator: torch.Generator = generator) -> torch.Tensor:
            return _standard(n, k, generator, distribution).mul_(k**-0.5).to(torch.bfloat16)

        def bias(n: int, generator: torch.Generator = generator) -> torch.Tensor | None:
            return (
                torch.randn(n, generator=generator, dtype=torch.float32, device="cpu") * 0.1
                if shape.biases
                else None
            )

        hidden, intermediate = shape.hidden_size, shape.intermediate_size
        experts.append(
            ExpertWeights(
                matrix(intermediate, hidden),
                matrix(intermediate, hidden),
                matrix(hidden, intermediate),
                bias(intermediate),
                bias(intermediate),
                bias(hidden),
            )
        )
    return experts


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a layer."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    distinct_experts: int


def _check_room(shape: Shape, tokens: int) -> None:
    # Scores in f32, hidden as it is drawn and in bf16, the result in f32; ids and weights of top-k.
    a_token = 4 * shape.num_experts + 10 * shape.hidden_size + 12 * shape.num_experts_per_tok
    budget = int(0.6 * available_memory())
    if tokens * a_token > budget:
        raise MemoryError(
            f"a call with {tokens} tokens of {shape.name} takes {tokens * a_token / 1e9:.1f} GB, "
            f"which is more than 60 % of the free memory; {budget // a_token} tokens are not"
        )


def routed_calls(shape: Shape, tokens: int, seed: int = 0) -> list[Call]:
    """Make calls with random routings, for one layer to take in turn.

    Within a call each token goes to random distinct experts. From call to call the experts that
    were not used for longest come first, so that a layer is used up evenly and a call does not
    find in the cache what the one before it read: models have many layers, and the benchmark
    rotates only a few.

    Raises
    ------
    MemoryError
        One call would take more than 60 % of the free memory.
    """
    _check_room(shape, tokens)
    experts, top_k = shape.num_experts, shape.num_experts_per_tok
    generator = torch.Generator().manual_seed(1000 * tokens + seed)
    # Least recently used first.
    by_age = torch.randperm(experts, generator=generator, device="cpu").tolist()
    calls: list[Call] = []
    used = 0
    while not calls or (used < experts and len(calls) < 64):
        scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float32, device="cpu")
        drawn = scores.topk(top_k, dim=1).indices
        hit = torch.unique(drawn)
        rename = torch.empty(experts, dtype=torch.int64, device="cpu")
        rename[hit] = torch.tensor(by_age[: len(hit)], dtype=torch.int64, device="cpu")
        by_age = by_age[len(hit) :] + by_age[: len(hit)]
        used += len(hit)
        logits = torch.randn(tokens, top_k, generator=generator, dtype=torch.float32, device="cpu")
        calls.append(
            Call(
                hidden=torch.randn(
                    tokens,
                    shape.hidden_size,
                    generator=generator,
                    dtype=torch.float32,
                    device="cpu",
                ).bfloat16(),
                ids=rename[drawn].contiguous(),
                weights=torch.softmax(logits, dim=1).contiguous(),
                distinct_experts=len(hit),
            )
        )
    return calls
