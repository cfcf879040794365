"""Zero experts of vLLM and SGLang: both take them from the routing before they call experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk.hosts.zero_experts import take_zero_experts, without_weightless
from ktk.sglang.zero_experts import zero_experts_compute_triton
from ktk.vllm.zero_experts import routing

E, Z, K, H, TOKENS = 5, 3, 4, 72, 37


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("there is no kernel on CPUs")


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, E + Z, (TOKENS, K))
    return torch.randn(TOKENS, H), ids, torch.rand(TOKENS, K) + 0.1


def layer(zero: int) -> ktk.MoE:
    torch.manual_seed(1)
    moe = ktk.load_backend("BF16").moe(
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        intermediate_size=64,
        zero_expert_num=zero,
    )
    gate, up = torch.randn(2, E, 64, H) / H**0.5
    return moe.load(gate, up, torch.randn(E, H, 64) / 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_taken_and_what_is_left_add_up_to_a_layer_that_has_them(dtype: torch.dtype) -> None:
    x, ids, weights = drawn()
    x = x.to(dtype)
    want = layer(Z)(x, ids, weights).double()
    left, rest = ids.clone(), weights.clone()
    added = zero_experts_compute_triton(never, left, rest, E, "identity", x)
    assert added.dtype == dtype
    assert torch.equal(left, torch.where(ids < E, ids, 0))
    assert torch.equal(rest, torch.where(ids < E, weights, 0))
    moe, named = layer(0), without_weightless(left, rest)
    experts = moe(x, named, rest)
    # The whole and both parts of it are rounded once, as is each term here; sums of up to K terms
    # in f32 are rounded at most 2 K times, in either way to add them.
    each = sum(moe(x, named[:, i : i + 1], rest[:, i : i + 1]).double().abs() for i in range(K))
    size = each + weights.sum(-1, keepdim=True).double() * x.double().abs()
    rounded = want.abs() + experts.double().abs() + added.double().abs()
    eps = torch.finfo(torch.float32).eps
    error = torch.finfo(dtype).eps / 2 * (rounded + size) + 4 * K * eps * size
    assert ((experts.double() + added.double() - want).abs() <= error).all()


def test_an_expert_of_weight_zero_changes_no_bit() -> None:
    x, ids, weights = drawn()
    ids %= E
    weights[::3, 1] = 0
    moe = layer(0)
    named = moe(x, ids, weights)
    assert torch.equal(moe(x, without_weightless(ids, weights), weights), named)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_tokens_are_routed_as_by_the_formula(score: str, renormalize: bool) -> None:
    torch.manual_seed(2)
    x, logits, bias = torch.randn(TOKENS, H), torch.randn(TOKENS, E + Z), torch.randn(E + Z) / 4
    router = SimpleNamespace(
        scoring_func=score,
        e_score_correction_bias=torch.nn.Parameter(bias, requires_grad=False),
        top_k=K,
        renormalize=renormalize,
        routed_scaling_factor=1.5,
        num_logical_experts=E,
        zero_expert_type="identity",
    )
    weights, ids = routing(never)(router, x, logits, None)
    assert ids.dtype == torch.int32
    exact = logits.double().numpy()
    scores = 1 / (1 + np.exp(-exact))
    if score == "softmax":
        scores = np.exp(exact) / np.exp(exact).sum(1, keepdims=True)
    chosen = np.argsort(-(scores + bias.double().numpy()), 1)[:, :K]
    factors = np.take_along_axis(scores, chosen, 1)
    factors = 1.5 * (factors / factors.sum(1, keepdims=True) if renormalize else factors)
    dense = np.zeros((TOKENS, E + Z))
    np.put_along_axis(dense, chosen, factors, 1)
    found = np.zeros((TOKENS, E))
    np.add.at(found, (np.arange(TOKENS)[:, None], ids.numpy()), weights.double().numpy())
    # exp, sums and quotients of at most E + Z terms, each rounded in f32
    bound = 8 * (E + Z) * float(np.finfo(np.float32).eps)
    np.testing.assert_allclose(found, dense[:, :E], rtol=bound, atol=0)
    zero = dense[:, E:].sum(1, keepdims=True) * x.double().numpy()
    np.testing.assert_allclose(router._zero_expert_output, zero, rtol=bound, atol=0)


def test_tensors_elsewhere_go_to_the_hosts_own_kernels() -> None:
    x, ids, weights = (one.to("meta") for one in drawn())
    called: list[str] = []

    def original(*_: Any, **__: Any) -> Any:
        called.append("original")

    zero_experts_compute_triton(original, ids, weights, E, "identity", x)
    routing(original)(SimpleNamespace(), x, x, None)
    assert called == ["original"] * 2


def test_other_kinds_are_refused() -> None:
    x, ids, weights = drawn()
    with pytest.raises(ValueError, match="of the type 'identity', got 'drop'"):
        take_zero_experts(ids, weights, E, "drop", x)
