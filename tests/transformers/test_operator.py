"""The operator "ktk::moe": the bits of a call, in graphs too, and what it costs beside one."""

from __future__ import annotations

import copy
import functools
import pickle
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ktk
from ktk.hosts import OpLayer
from ktk.hosts.linear import OpLinear

EXPERTS, H, INTER, K = 6, 64, 96, 3


@pytest.fixture(scope="module")
def layer() -> OpLayer:
    generator = torch.Generator().manual_seed(0)
    moe = ktk.load_backend("BF16").moe(
        num_experts=EXPERTS, num_experts_per_tok=K, hidden_size=H, intermediate_size=INTER
    )
    gate, up = torch.randn(2, EXPERTS, INTER, H, generator=generator) / H**0.5
    return OpLayer(moe.load(gate, up, torch.randn(EXPERTS, H, INTER) / INTER**0.5), "experts")


def call(tokens: int = 5, k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return (
        torch.randn(tokens, H, generator=generator).bfloat16(),
        torch.randint(0, EXPERTS, (tokens, k), generator=generator),
        torch.rand(tokens, k, generator=generator),
    )


@pytest.mark.parametrize("k", [1, K, EXPERTS])
def test_it_computes_what_the_layer_does(layer: OpLayer, k: int) -> None:
    assert torch.equal(layer(*call(k=k)), layer.moe(*call(k=k)))


def test_other_dtypes_and_strides_are_taken(layer: OpLayer) -> None:
    x, ids, weights = call()
    wide = torch.empty(H, len(x), dtype=x.dtype).t().copy_(x)
    assert torch.equal(layer(wide, ids.to(torch.uint8), weights.double()), layer(x, ids, weights))


def test_compiled_graphs_have_it_as_one_node(layer: OpLayer) -> None:
    def model(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return layer(x * 2, ids, weights) + x

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 5, 9):
        assert torch.equal(compiled(*call(tokens)), model(*call(tokens)))


def test_torch_finds_nothing_wrong_with_it(layer: OpLayer) -> None:
    torch.library.opcheck(
        torch.ops.ktk.moe.default,
        (*call(), layer.number),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_gradients_are_those_of_the_layer(layer: OpLayer) -> None:
    x, ids, weights = call()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x.dtype)
    wanted = layer.moe.backward(grad, x, ids, weights)
    for compute in (layer, functools.partial(torch.ops.ktk.moe, layer=layer.number)):
        one, other = x.clone().requires_grad_(), weights.clone().requires_grad_()
        compute(one, ids, other).backward(grad)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, wanted.hidden)
        assert torch.equal(other.grad, wanted.topk_weights)
    with torch.no_grad():
        assert not layer(one, ids, weights).requires_grad


@pytest.mark.parametrize("make", ["experts", "dense"])
def test_what_was_computed_keeps_its_layer(make: str) -> None:
    """As torch's own modules do: a loss may outlive its model."""
    weight = torch.eye(H, dtype=torch.bfloat16)
    x = torch.randn(2, H, requires_grad=True)
    compute: Callable[..., torch.Tensor]
    if make == "experts":
        moe = ktk.load_backend("BF16").moe(
            num_experts=1, num_experts_per_tok=1, hidden_size=H, intermediate_size=H
        )
        known: Any = OpLayer(moe.load(weight[None], weight[None], weight[None]))
        ids, ones = torch.zeros(2, 1, dtype=torch.long), torch.ones(2, 1)
        compute = functools.partial(torch.ops.ktk.moe, x, ids, ones)
        out = known(x, ids, ones)
        del moe
    else:
        known = OpLinear(ktk.Linear("BF16", H, H).load(weight), "dense")
        compute = functools.partial(torch.ops.ktk.linear, x, width=H)
        out = torch.ops.ktk.linear(x, known.number, H)
    gone, number = weakref.ref(known), known.number
    del known
    assert gone() is not None
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.abs().min() > 0
    del out
    assert gone() is None
    with pytest.raises(RuntimeError, match="layer that this computation calls is gone"):
        compute(layer=number)


@pytest.mark.parametrize("trained", [False, True])
def test_second_derivatives_are_refused(
    layer: OpLayer, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    x, ids, weights = call()
    x = x.float().requires_grad_()
    out = layer(x, ids, weights) if trained else torch.ops.ktk.moe(x, ids, weights, layer.number)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"ktk has first derivatives .*\(create_graph=True\)"):
        grad.square().sum().backward()


def test_copies_share_the_packed_weights_and_pickles_are_refused(layer: OpLayer) -> None:
    assert copy.deepcopy(layer) is layer
    with pytest.raises(TypeError, match=r"experts cannot be pickled.*ktk convert"):
        pickle.dumps(layer)


def test_it_costs_little_beside_the_call(layer: OpLayer, monkeypatch: pytest.MonkeyPatch) -> None:
    one = call(1)

    class Nothing:
        """A layer without workers, whose turns on a busy machine would be what is measured."""

        def __call__(self, *call: torch.Tensor, out: torch.Tensor | None = None) -> None:
            pass

    def microseconds(function: Any) -> float:
        # The least of many: what others do meanwhile only adds.
        return min(timeit.repeat(lambda: function(*one), number=50, repeat=200)) / 50 * 1e6

    nothing = Nothing()
    monkeypatch.setattr(layer, "compute", nothing)
    with torch.no_grad():
        assert microseconds(layer) - microseconds(nothing) <= 15
