"""What calls of training take and refuse; numbers are the conformance kit's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk import _core

E, TOP_K, H, I = 4, 2, 64, 32  # noqa: E741
RANK = 4
SHAPES = {
    "gate_a": (E, RANK, H),
    "gate_b": (E, I, RANK),
    "up_a": (E, RANK, H),
    "up_b": (E, I, RANK),
    "down_a": (E, RANK, I),
    "down_b": (E, H, RANK),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(seed: int = 0) -> ktk.Lora:
    factors = {name: random(*shape, seed=seed) / 8 for name, shape in SHAPES.items()}
    return ktk.Lora(**factors, scale=2.0)


@pytest.fixture(scope="module")
def moe() -> ktk.MoE:
    made = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=TOP_K, hidden_size=H, intermediate_size=I
    )
    for number in range(E):
        gate, up, down = (random(I, H, seed=3 * number + i) / 8 for i in range(3))
        made.load_expert(number, gate, up, down.reshape(H, I))
    return made


def call(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.arange(tokens * TOP_K).reshape(tokens, TOP_K) % E
    return random(tokens, H), ids, torch.full((tokens, TOP_K), 0.5)


@pytest.mark.parametrize("lora", [None, adapter()], ids=["frozen", "adapter"])
@pytest.mark.parametrize("kept", [True, False])
def test_no_tokens_have_no_gradients(moe: ktk.MoE, lora: ktk.Lora | None, kept: bool) -> None:
    """An empty tensor of torch has no memory, one of numpy has."""
    given = call(0)
    out, saved = moe.forward_train(*given, lora=lora)
    found = moe.backward(out, *given, saved=saved if kept else None, lora=lora, weight_grads=True)
    assert found.hidden.shape == (0, H)
    assert found.topk_weights.shape == (0, TOP_K)
    for one in found.lora.factors() if found.lora else ():
        assert not one[1].any()
    assert found.weights is not None
    assert not torch.as_tensor(found.weights.gate).any()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lora": [adapter()]}, "lora must be a ktk.Lora, got"),
        ({"weight_grads": 3}, "weight_grads must be True, False or a range of experts, got 3"),
        ({"weight_grads": [1]}, "weight_grads must be True, False or a range of experts, got"),
        ({"weight_grads": range(2, 5)}, "weight_grads must be a range of experts below 4"),
        ({"weight_grads": range(0, 4, 2)}, "weight_grads must be a range of experts below 4"),
    ],
)
def test_what_is_no_option_is_refused(moe: ktk.MoE, options: dict[str, Any], sentence: str) -> None:
    given = call(3)
    with pytest.raises((TypeError, ValueError), match=sentence.replace(".", r"\.")):
        moe.backward(given[0], *given, **options)


@pytest.mark.parametrize(
    "scale", [float("nan"), -float("inf"), 1e39, 10**400], ids=["nan", "-inf", "f64", "int"]
)
def test_a_scale_is_a_finite_number_of_float32(scale: float) -> None:
    factors = dict(adapter().factors())
    with pytest.raises(ValueError, match=r"^scale must be a finite number of float32, got"):
        ktk.Lora(**factors, scale=scale)
    with pytest.raises(TypeError, match=r"^scale must be a number, got '2'"):
        ktk.Lora(**factors, scale="2")  # type: ignore[arg-type]
    largest = float(np.finfo(np.float32).max)
    assert ktk.Lora(**factors, scale=-largest).given()[1] == -largest


def test_a_gradient_is_only_read(moe: ktk.MoE) -> None:
    """Whatever its strides: `y.sum().backward()` hands out one element for all."""
    given = call(3)
    wanted = moe.backward(torch.ones(3, H), *given)
    ones = np.ones((3, H), np.float32)
    ones.flags.writeable = False
    alike = [
        torch.ones(()).expand(3, H),
        torch.ones(1, H).expand(3, H),
        torch.ones(H, 3).T,
        torch.ones(3, 2 * H)[:, ::2],
        ones,
        np.broadcast_to(np.float32(1), (3, H)),
    ]
    for grad in alike:
        found = moe.backward(grad, *given)
        assert torch.equal(found.hidden, wanted.hidden)
        assert torch.equal(found.topk_weights, wanted.topk_weights)
    for wrong in (torch.ones(2, H), torch.ones(3, 1, H), torch.ones(3, H - 1)):
        with pytest.raises(ValueError, match=r"grad must have .*, got \["):
            moe.backward(wrong, *given)


@pytest.mark.slow
def test_products_that_were_kept_change_no_bit_of_several_chunks() -> None:
    """Sums of gradients show where tokens were divided."""
    experts, hidden, width, top_k, rank, tokens = 2, 16, 2048, 32, 8, 2100
    made = ktk.load_backend("BF16").moe(
        num_experts=experts, num_experts_per_tok=2, hidden_size=hidden, intermediate_size=width
    )
    for number in range(experts):
        gate, up, down = (random(width, hidden, seed=3 * number + i) / 4 for i in range(3))
        made.load_expert(number, gate, up, down.reshape(hidden, width))
    shapes = {
        "gate_a": (experts, rank, hidden),
        "gate_b": (experts, width, rank),
        "down_a": (experts, rank, width),
        "down_b": (experts, hidden, rank),
    }
    factors: dict[str, Any] = {name: random(*shape) / 8 for name, shape in shapes.items()}
    lora = ktk.Lora(**factors)
    # Room for so many experts is what divides tokens; two are named.
    ids = torch.full((tokens, top_k), -1)
    ids[:, :2] = torch.tensor([0, 1])
    given = random(tokens, hidden), ids, random(tokens, top_k, seed=1)
    _, saved = made.forward_train(*given, lora=lora)
    grad = random(tokens, hidden, seed=2)
    found = [made.backward(grad, *given, saved=one, lora=lora) for one in (saved, None)]
    kept_factors, again_factors = (list(one.lora.factors()) for one in found if one.lora)
    for kept, again in zip(kept_factors, again_factors, strict=True):
        assert torch.equal(kept[1], again[1]), kept[0]
    # Each token has the gradient that it has in a chunk of its own; sums over tokens add up.
    pieces = [slice(begin, begin + 300) for begin in range(0, tokens, 300)]
    alone = [made.backward(grad[at], *(one[at] for one in given), lora=lora) for at in pieces]
    for one in found:
        assert torch.equal(one.hidden, torch.cat([part.hidden for part in alone]))
        assert torch.equal(one.topk_weights, torch.cat([part.topk_weights for part in alone]))
    parts = [dict(one.lora.factors()) for one in alone if one.lora]
    for name, value in kept_factors:
        # Sums in another order: 2^-24 of itself at each of `tokens` roundings, by chance the root.
        wanted = sum(part[name].double() for part in parts)
        assert (value - wanted).norm() < 4 * 2**-24 * tokens**0.5 * wanted.norm(), name


def test_tokens_of_each_chunk_have_the_gradients_that_they_have_alone(moe: ktk.MoE) -> None:
    """More tokens than a chunk takes, of a forward and of a backward pass, and of a dense layer."""
    tokens, at = 4500, [0, 4095, 4096, 4499]
    x, ids, weights = call(tokens)
    grad = random(tokens, H, seed=3)
    found = moe.backward(grad, x, ids, weights, weight_grads=True)
    halves = [slice(0, 3000), slice(3000, tokens)]
    parts = [
        moe.backward(grad[half], x[half], ids[half], weights[half], weight_grads=True)
        for half in halves
    ]
    assert torch.equal(found.hidden, torch.cat([part.hidden for part in parts]))
    assert torch.equal(found.topk_weights, torch.cat([part.topk_weights for part in parts]))
    for name in ("gate", "up", "down"):
        values = [getattr(one.weights, name).double() for one in (found, *parts)]
        wanted = values[1] + values[2]
        assert (values[0] - wanted).norm() < 4 * 2**-24 * tokens**0.5 * wanted.norm(), name
    y = moe(x, ids, weights)
    adapters, whose = [adapter(1), adapter(2)], torch.arange(tokens) % 3 - 1
    adapted = moe(x, ids, weights, lora=adapters, adapter_ids=whose)
    for i in at:
        one = x[i : i + 1], ids[i : i + 1], weights[i : i + 1]
        assert torch.equal(y[i : i + 1], moe(*one)), i
        alone = moe(*one, lora=adapters, adapter_ids=whose[i : i + 1])
        assert torch.equal(adapted[i : i + 1], alone), i
    dense = ktk.Linear("BF16", H, 3).load(random(3, H))
    grad = random(tokens, 3, seed=4)
    dx = dense.backward(grad)
    for i in (0, 2047, 2048, *at):
        assert torch.equal(dx[i], dense.backward(grad[i])), i


def test_ids_of_adapters_are_of_either_kind(moe: ktk.MoE) -> None:
    given, adapters = call(5), [adapter(1), adapter(2)]
    ids = torch.tensor([0, 1, -1, 1, 0])
    wanted = moe(*given, lora=adapters, adapter_ids=ids.int())
    assert torch.equal(wanted, moe(*given, lora=adapters, adapter_ids=ids))
    for none in (2**32, 2**31, 2, -(2**40)):
        ids[2] = none
        assert torch.equal(wanted, moe(*given, lora=adapters, adapter_ids=ids))
    with pytest.raises(ValueError, match="adapter_ids"):
        moe(*given, lora=adapters, adapter_ids=ids[:4])


def test_a_dense_layer_has_the_gradient_of_its_input() -> None:
    weight, grad = random(96, 128) / 8, random(2, 5, 96, seed=1)
    layer = ktk.Linear("BF16", 128, 96)
    with pytest.raises(RuntimeError, match="loaded"):
        layer.backward(grad)
    layer.load(weight)
    found = layer.backward(grad)
    stored = torch.as_tensor(layer.unpack()).double()
    # A product of bf16 gradients, added up in float32: two roundings of an operand, and the sums.
    bound = (2 * 2.0**-8 + 96 * 2.0**-24) * (grad.double().abs() @ stored.abs())
    assert ((found.double() - grad.double() @ stored).abs() <= bound).all()
    out = torch.empty(2, 5, 128, dtype=torch.bfloat16)
    assert layer.backward(grad.requires_grad_(), out=out) is out
    assert torch.equal(out, found.bfloat16())
    for threads in (1, 3):
        other = ktk.Linear("BF16", 128, 96, pool=_core.WorkerPool(threads, pin=False)).load(weight)
        assert torch.equal(other.backward(grad), found)
    assert layer.backward(torch.zeros(0, 96)).shape == (0, 128)
    with pytest.raises(ValueError, match="grad"):
        layer.backward(random(5, 128))
