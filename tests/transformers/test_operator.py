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


def adapters(dtype: torch.dtype = torch.float32) -> list[ktk.Lora]:
    """Make two: of rank 4 beside all matrices, and of rank 2 beside one."""
    generator = torch.Generator().manual_seed(7)

    def factors(part: str, rank: int) -> dict[str, Any]:
        width, rows = (INTER, H) if part == "down" else (H, INTER)
        return {
            f"{part}_a": torch.randn(EXPERTS, rank, width, generator=generator).to(dtype),
            f"{part}_b": torch.randn(EXPERTS, rows, rank, generator=generator).to(dtype),
        }

    wide = {k: v for part in ("gate", "up", "down") for k, v in factors(part, 4).items()}
    return [ktk.Lora(**wide, scale=0.25), ktk.Lora(**factors("up", 2), scale=-2.0)]


# One with the first adapter, with none, and with the second; a number that is none; and again.
CHOSEN = torch.tensor([0, -1, 1, 2, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_choose_adapters_as_in_a_call(layer: OpLayer, dtype: torch.dtype) -> None:
    both = adapters(dtype)
    wanted = layer.moe(*call(), lora=both, adapter_ids=CHOSEN)
    assert torch.equal(layer(*call(), both, CHOSEN), wanted)
    numbers = torch.stack([CHOSEN, CHOSEN], dim=1)[:, 0]  # with a stride
    assert torch.equal(layer(*call(), both, numbers), wanted)
    assert torch.equal(layer(*call(), both, CHOSEN.int()), wanted)
    # A token's is what all tokens with that adapter have, and without one what they have without.
    parts = [layer.moe(*call(), lora=one) for one in both]
    without = layer(*call())
    for token, number in enumerate(CHOSEN.tolist()):
        alone = parts[number][token] if number in (0, 1) else without[token]
        assert torch.equal(wanted[token], alone)
    assert not torch.equal(wanted[0], without[0])
    assert not torch.equal(wanted[2], without[2])
    assert torch.equal(layer(*call(), both[1], torch.zeros(5).int()), parts[1])
    assert torch.equal(layer(*call(), both[:1]), parts[0])


def test_one_adapter_in_a_list_is_for_all_tokens(layer: OpLayer) -> None:
    both = adapters()
    hidden, ids, weights = call()
    gradients = []
    for lora in (both[0], both[:1]):
        given = hidden.clone().requires_grad_()
        layer(given, ids, weights, lora).sum().backward()
        assert given.grad is not None
        gradients.append(given.grad)
    assert torch.equal(*gradients)


def test_compiled_graphs_choose_adapters_by_token(layer: OpLayer) -> None:
    both = adapters()

    def model(x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor, which: Any) -> torch.Tensor:
        return layer(x * 2, ids, w, lora=both, adapter_ids=which) + x

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (1, 5, 9):
        x, ids, weights = call(tokens)
        which = torch.arange(tokens) % 4 - 1
        wanted = layer.moe(x * 2, ids, weights, lora=both, adapter_ids=which) + x
        with torch.no_grad():
            assert torch.equal(compiled(x, ids, weights, which), wanted)


def test_torch_finds_nothing_wrong_with_adapters_by_token(layer: OpLayer) -> None:
    both = adapters()
    factors = [factor for one in both for _, factor in one.factors()]
    torch.library.opcheck(
        torch.ops.ktk.moe_adapters.default,
        (*call(), factors, [7, 2], [0.25, -2.0], CHOSEN, layer.number),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )
    with pytest.raises(ValueError, match="targets name 6 factors, and 8 are given"):
        torch.ops.ktk.moe_adapters(*call(), factors, [7], [1.0], CHOSEN, layer.number)


def test_adapters_by_token_of_other_shapes_are_refused(layer: OpLayer) -> None:
    both = adapters()
    with pytest.raises(ValueError, match="adapter_ids"):
        layer(*call(), both, CHOSEN[:4])
    with pytest.raises((TypeError, ValueError), match="adapter_ids"):
        layer(*call(), both, CHOSEN.float())
    with pytest.raises(ValueError, match="several adapters need adapter_ids"):
        layer(*call(), both)
    with pytest.raises(ValueError, match="adapter_ids name adapters, but lora gives none"):
        layer(*call(), None, CHOSEN)
    narrow = ktk.Lora(up_a=both[1].up_a[..., :-1], up_b=both[1].up_b)  # type: ignore[index]
    with pytest.raises(ValueError, match="up_a"):
        layer(*call(), [both[0], narrow], CHOSEN)


def test_adapters_by_token_are_not_trained(layer: OpLayer) -> None:
    x, ids, weights = call()
    out = layer(x.requires_grad_(), ids, weights, adapters(), CHOSEN)
    with pytest.raises(RuntimeError, match="no backward pass: train each adapter for itself"):
        out.sum().backward()


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
