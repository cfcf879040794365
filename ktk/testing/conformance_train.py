"""Properties of the backward pass of a layer, and of adapters, with any backend's weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ktk
from ktk.dtypes import FLOAT_DTYPES
from ktk.lora import FACTORS
from ktk.testing import bounds, dense, formats, gradients, reference, strategies
from ktk.testing.strategies import ACTIVATIONS, Batch, Layer
from ktk.testing.subject import Subject, stored_experts
from ktk.training import linear_backward


def _draw(
    subject: Subject, data: st.DataObject, activation: dict[str, Any] | None = None
) -> tuple[Layer, Batch, ktk.Lora | None]:
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    drawn = strategies.layers(subject.backend, subject.variant, activation)
    layer = data.draw(drawn, label="layer")
    batch = data.draw(strategies.batches(layer.config), label="batch")
    return layer, batch, data.draw(adapters(layer.config), label="lora")


@st.composite
def adapters(draw: st.DrawFn, config: ktk.MoEConfig) -> ktk.Lora | None:
    """No adapter, or one of some of the matrices, of any small rank."""
    parts = draw(st.sets(st.sampled_from(config.parts)), label="targets")
    if not parts:
        return None
    rank = draw(st.sampled_from([1, 4, 8, 17]), label="rank")
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]), label="dtype")
    generator = torch.Generator().manual_seed(draw(strategies.seeds(), label="seed of factors"))
    e, h, i = config.num_experts, config.hidden_size, config.intermediate_size
    found: dict[str, Any] = {}
    for part in sorted(parts):
        rows, columns = (h, i) if part == "down" else (i, h)
        a = (
            torch.randn(e, rank, columns, generator=generator, dtype=torch.float32, device="cpu")
            * columns**-0.5
        )
        found[f"{part}_a"] = a.to(dtype)
        found[f"{part}_b"] = torch.randn(
            e, rows, rank, generator=generator, dtype=torch.float32, device="cpu"
        ).to(dtype)
    return ktk.Lora(**found, scale=draw(st.sampled_from([0.5, 2.0]), label="scale"))


def _gradient(batch: Batch, seed: int) -> strategies.F32:
    return np.random.default_rng(seed).standard_normal(batch.hidden.shape).astype(np.float32)


def _elements() -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(FLOAT_DTYPES))


def _as(element: str, values: strategies.F32) -> Any:
    """Round what a call is given; no number leaves the range of its element."""
    if element == "f32":
        return values
    if element == "f16":
        values = np.clip(values, -60000, 60000)
    return torch.from_numpy(values).to(FLOAT_DTYPES[element])


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: "-".join(map(str, a.values())))
@given(data=st.data())
def test_gradients_are_within_the_propagated_bound(
    subject: Subject, activation: dict[str, Any], data: st.DataObject
) -> None:
    """All gradients differ from float64 by no more than bf16 operands and f32 sums explain.

    That of hidden states has their dtype, and the rounding to it; the others are f32.
    """
    layer, batch, lora = _draw(subject, data, activation)
    experts = layer.config.num_experts
    moe = subject.moe(layer, shards=data.draw(st.integers(1, min(2, layer.most_shards))))
    element, of_grad = (data.draw(_elements(), label=what) for what in ("hidden", "grad"))
    hidden = _as(element, batch.hidden)
    call = (hidden, batch.ids, batch.weights)
    mask = np.random.default_rng(data.draw(strategies.seeds(), label="mask")).random(experts) < 0.2
    grad = _as(of_grad, _gradient(batch, data.draw(strategies.seeds(), label="seed of grad")))
    _, kept = moe.forward_train(*call, lora=lora, mask=mask)
    assert kept is not None
    first = data.draw(st.integers(0, experts - 1), label="first expert with weight gradients")
    some = range(first, experts)
    got = moe.backward(grad, *call, saved=kept, lora=lora, mask=mask, weight_grads=some)
    with np.errstate(all="ignore"):
        expected = gradients.bounded_backward(
            formats.as_float64(grad),
            formats.as_float64(hidden),
            batch.ids,
            batch.weights.astype(np.float64),
            kept.double().numpy(),
            stored_experts(moe, layer),
            layer.config,
            lora,
            mask,
        )
    assert got.hidden.dtype == hidden.dtype
    dx = gradients.returned(expected.hidden, element)
    bounds.check(formats.as_float64(got.hidden), dx.value, _finite(dx), f"hidden as {element}")
    wanted = expected.topk_weights
    bounds.check(got.topk_weights, wanted.value, _finite(wanted), "topk_weights")
    assert (got.lora is None) == (lora is None)
    for name, array in got.lora.factors() if got.lora else ():
        for number in range(experts):
            one = expected.factors.get(number, {}).get(name)
            _check(array[number], one, f"{name} of expert {number}")
    assert got.weights is not None
    assert got.weights.experts == some
    for number in some:
        for name in _weights(layer.config):
            one = expected.weights.get(number, {}).get(name)
            array = np.asarray(getattr(got.weights, name)[number - first])
            array = array if array.ndim == 2 else array[:, np.newaxis]
            _check(array, one, f"{name} of expert {number}")


def _weights(config: ktk.MoEConfig) -> list[str]:
    return [f"{part}{suffix}" for part in config.parts for suffix in ("", "_bias")]


def _check(got: Any, expected: reference.Uncertain | None, what: str) -> None:
    if expected is None:  # no row names the expert
        assert not np.asarray(got).any(), what
    else:
        bounds.check(got, expected.value, _finite(expected), what)


def _finite(expected: reference.Uncertain) -> bounds.Array:
    """Return the bound; infinite where values may leave the range of f32 on the way."""
    error = expected.error
    return np.where(np.isfinite(error) & np.isfinite(expected.value), error, np.inf)


@given(data=st.data())
def test_gradients_have_the_same_bits(subject: Subject, data: st.DataObject) -> None:
    """Neither threads nor what is kept between the passes change a bit."""
    layer, batch, lora = _draw(subject, data)
    call = (batch.hidden, batch.ids, batch.weights)
    grad = _gradient(batch, 3)
    found = []
    for threads in (1, 2, 3):
        moe = subject.moe(layer, threads=threads)
        _, kept = moe.forward_train(*call, lora=lora)
        found += [
            moe.backward(grad, *call, saved=saved, lora=lora, weight_grads=True)
            for saved in (kept, None)
        ]
    for other in found[1:]:
        bounds.check_same_bits(other.hidden, found[0].hidden, "hidden")
        bounds.check_same_bits(other.topk_weights, found[0].topk_weights, "topk_weights")
        for name in FACTORS if lora else ():
            one, first = getattr(other.lora, name), getattr(found[0].lora, name)
            if first is not None:
                bounds.check_same_bits(one, first, name)
        for name in _weights(layer.config):
            one, first = getattr(other.weights, name), getattr(found[0].weights, name)
            bounds.check_same_bits(one, first, f"weight gradients of {name}")


@given(data=st.data())
def test_an_adapter_adds_what_it_says(subject: Subject, data: st.DataObject) -> None:
    """Output and kept products are those of the layer with the adapter inside its experts."""
    layer, batch, lora = _draw(subject, data)
    moe = subject.moe(layer)
    call = (batch.hidden, batch.ids, batch.weights)
    y, kept = moe.forward_train(*call, lora=lora)
    bounds.check_same_bits(moe(*call, lora=lora), y, "a call and forward_train")
    assert kept is not None
    acts = [subject.act_of(stored) for stored in layer.stored]
    slices = [width for shard in moe._core.slices for width in shard]
    value, error, size = (np.zeros(batch.hidden.shape) for _ in range(3))
    experts, scale = stored_experts(moe, layer), 1.0 if lora is None else lora.scale
    element = formats.ELEMENTS["bf16"]
    assert isinstance(element, formats.Float)
    with np.errstate(all="ignore"):
        for number, tokens, slots in reference.named(batch.ids, layer.config.num_experts):
            factors = gradients.factors_of(lora, number)
            before, after = reference.factors_of(
                batch.weights[tokens, slots].astype(np.float64), layer.config
            )
            products, out = gradients.expert_with(
                batch.hidden[tokens].astype(np.float64),
                before,
                experts[number],
                layer.config,
                acts,
                slices,
                factors,
                scale,
            )
            for which, one in enumerate(products):
                bound = one.error + element.rounding(one.size, up_to=True)
                got = kept.double().numpy()[tokens, slots, which, : one.value.shape[1]]
                bounds.check(got, one.value, np.where(np.isnan(bound), np.inf, bound), "kept")
            np.add.at(value, tokens, after * out.value)
            np.add.at(error, tokens, np.abs(after) * out.error)
            np.add.at(size, tokens, np.abs(after) * out.size)
        tokens, slots = np.nonzero(reference.passed(batch.ids, layer.config))
        factor = batch.weights[tokens, slots].astype(np.float64)[:, np.newaxis]
        through = factor * batch.hidden[tokens].astype(np.float64)
        np.add.at(value, tokens, through)
        np.add.at(size, tokens, np.abs(through))
        terms = (batch.ids.shape[1] + 1) * (len(slices) + 1)
        error += bounds.gamma(terms) * size + terms * bounds.TINY * (size > 0)
    within = np.where(size < bounds.LARGEST / 2, error, np.inf)
    bounds.check(y, value, within, "output")


@given(data=st.data())
def test_tokens_choose_adapters(subject: Subject, data: st.DataObject) -> None:
    """A token's result has the bits of a call in which all tokens have its adapter."""
    layer, batch, lora = _draw(subject, data)
    other = data.draw(adapters(layer.config), label="another adapter")
    known = [one for one in (lora, other) if one is not None]
    if not known:
        return
    moe = subject.moe(layer)
    call = (batch.hidden, batch.ids, batch.weights)
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of choice"))
    chosen = rng.integers(-1, len(known), len(batch.hidden)).astype(np.int32)
    mixed = np.asarray(moe(*call, lora=known, adapter_ids=chosen))
    plain = np.asarray(moe(*call))
    for number in range(-1, len(known)):
        alone = plain if number < 0 else np.asarray(moe(*call, lora=known[number]))
        mine = chosen == number
        bounds.check_same_bits(mixed[mine], alone[mine], f"tokens with adapter {number}")


@given(data=st.data())
def test_dense_gradients_are_within_the_propagated_bound(
    subject: Subject, data: st.DataObject
) -> None:
    """The gradient of a dense layer's input, too, and it has the same bits for any threads."""
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    layer = data.draw(dense.layers(subject.backend, subject.variant), label="layer")
    x = data.draw(dense.inputs(layer, 0), label="inputs")
    found = []
    for threads in (1, 3):
        linear = layer.make(subject, threads=threads)
        seed = np.random.default_rng(len(x))
        grad = seed.standard_normal((len(x), linear.out_features)).astype(np.float32)
        found.append(linear_backward(linear, grad, np.full_like(x, np.nan)))
    bounds.check_same_bits(found[1], found[0], "3 threads")
    weight = gradients.bf16(reference.exact(linear.unpack().astype(np.float64)))
    blocks = linear.out_features // 32 + 8
    with np.errstate(all="ignore"):
        dy = gradients.bf16(reference.exact(grad.astype(np.float64)))
        expected = gradients.product(dy, weight, blocks)
    bounds.check(found[0], expected.value, _finite(expected), "x")
