"""Layers in BF16Z are those in BF16, bit by bit, and say honestly what they take."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ktk

E, K, H, I = 4, 2, 96, 160  # noqa: E741 - the names of the table of families
CONFIG = ktk.MoEConfig(num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """The matrices of all experts."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    return {
        part: (torch.randn(shape, generator=generator) / 8).bfloat16()
        for part, shape in shapes.items()
    }


def any_bits(shape: torch.Size) -> torch.Tensor:
    """Finite weights with any exponent: nothing to compress."""
    bits = torch.randint(0, 0x7F80, shape, generator=torch.Generator().manual_seed(1))
    small = bits.to(torch.int16).view(torch.bfloat16).float().clamp(-1e4, 1e4)
    return small.bfloat16()


def run(moe: ktk.MoE, tokens: int) -> torch.Tensor:
    """What a layer makes of some tokens."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, H, generator=generator)
    ids = torch.randint(0, E, (tokens, K), generator=generator)
    out: torch.Tensor = moe(x, ids, torch.rand(tokens, K, generator=generator))
    return out


def make(backend: str, variant: str, given: dict[str, Any], shards: int = 1) -> ktk.MoE:
    moe = ktk.MoE(ktk.load_backend(backend), CONFIG, variant=variant, shards=shards)
    moe.load(**given)
    return moe


VARIANTS = [v.name for v in ktk.load_backend("BF16Z").variants if v.runnable]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_layer_is_that_of_bf16(variant: str, shards: int) -> None:
    given = weights()
    plain, packed = (make(name, variant, given, shards) for name in ("BF16", "BF16Z"))
    for tokens in (1, 5, 70):
        assert torch.equal(run(packed, tokens), run(plain, tokens))
    assert packed.nbytes < 0.85 * plain.nbytes
    for ours, theirs in zip(packed.unpack_expert(3), plain.unpack_expert(3), strict=True):
        assert np.asarray(ours == theirs).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_matrix_that_does_not_fit_is_plain_and_disturbs_no_other(
    variant: str, shards: int
) -> None:
    given = weights()
    usual = make("BF16Z", variant, given, shards).nbytes
    given["up"][1] = any_bits(given["up"][1].shape)
    given["down"][3] = any_bits(given["down"][3].shape)
    plain, packed = (make(name, variant, given, shards) for name in ("BF16", "BF16Z"))
    for tokens in (1, 5, 70):
        assert torch.equal(run(packed, tokens), run(plain, tokens))
    one = usual // (3 * E)
    assert usual + one // 4 < packed.nbytes < usual + 2 * one
    assert packed.nbytes < plain.nbytes
    # Weights that fit take its place, and the bytes come back.
    fitting: dict[str, Any] = weights()
    for expert in (1, 3):
        one_expert = {part: fitting[part][expert] for part in fitting}
        packed.load_expert(expert, **one_expert)
    assert packed.nbytes == usual
    assert torch.equal(run(packed, 5), run(make("BF16", variant, fitting, shards), 5))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("fits", [True, False])
def test_a_dense_layer_is_that_of_bf16(variant: str, fits: bool) -> None:
    weight = weights()["gate"][0] if fits else any_bits(torch.Size((I, H)))
    generator = torch.Generator().manual_seed(4)
    x, bias = torch.randn(9, H, generator=generator), torch.randn(I, generator=generator)
    plain, packed = (
        ktk.Linear(name, H, I, True, variant=variant).load(weight, bias=bias)
        for name in ("BF16", "BF16Z")
    )
    assert torch.equal(packed(x), plain(x))
    assert (packed.nbytes < plain.nbytes) == fits
    assert (packed.unpack() == plain.unpack()).all()
