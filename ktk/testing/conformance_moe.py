"""Properties of a layer that is computed with a backend, through ``ktk.MoE``."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import ktk
from ktk.config import PARTS
from ktk.dtypes import FLOAT_DTYPES
from ktk.testing import bounds, formats, strategies
from ktk.testing.strategies import ACTIVATIONS, Batch, Layer
from ktk.testing.subject import Subject


def _call(moe: ktk.MoE, batch: Batch, **keywords: Any) -> strategies.F32:
    result = moe(batch.hidden, batch.ids, batch.weights, **keywords)
    array = np.asarray(result)
    assert array.dtype == np.float32
    assert array.shape == batch.hidden.shape
    return array.copy()


def _draw(
    subject: Subject, data: st.DataObject, min_tokens: int = 0, outside: bool = True
) -> tuple[Layer, Batch]:
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    layer = data.draw(strategies.layers(subject.backend, subject.variant), label="layer")
    return layer, data.draw(strategies.batches(layer.config, min_tokens, outside), label="batch")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: "-".join(map(str, a.values())))
@given(data=st.data())
def test_layer_is_within_the_propagated_bound(
    subject: Subject, activation: dict[str, Any], data: st.DataObject
) -> None:
    """The layer differs from float64 by no more than its codecs and roundings explain."""
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    layer = data.draw(
        strategies.layers(subject.backend, subject.variant, activation), label="layer"
    )
    batch = data.draw(strategies.batches(layer.config), label="batch")
    moe = subject.moe(layer)
    expected = subject.expected(moe, layer, batch)
    bounds.check(_call(moe, batch), expected.value, expected.error, "output")


@given(data=st.data())
def test_any_number_of_threads_gives_the_same_bits(subject: Subject, data: st.DataObject) -> None:
    """Threads share the work, not the rounding."""
    layer, batch = _draw(subject, data)
    one = _call(subject.moe(layer, threads=1), batch)
    for threads in (2, 3):
        result = _call(subject.moe(layer, threads=threads), batch)
        bounds.check_same_bits(result, one, f"{threads} threads")


@given(data=st.data())
def test_shards_agree(subject: Subject, data: st.DataObject) -> None:
    """Any number of shards is a layer, of the very weights where those are stored as given."""
    layer, batch = _draw(subject, data)
    kept = all(pair.kept for pair in layer.conversions)
    whole = subject.moe(layer, shards=1)
    for shards in range(1, min(4, layer.most_shards) + 1):
        moe = subject.moe(layer, shards=shards)
        assert len(moe.shard_widths) == shards
        expected = subject.expected(moe, layer, batch)
        bounds.check(_call(moe, batch), expected.value, expected.error, f"{shards} shards")
        for expert in range(layer.config.num_experts if kept else 0):
            pairs = zip(moe.unpack_expert(expert), whole.unpack_expert(expert), strict=True)
            for part, (cut, uncut) in zip(PARTS, pairs, strict=True):
                assert (cut is None) == (uncut is None) == (part not in layer.config.parts)
                if cut is not None and uncut is not None:
                    bounds.check_same_bits(cut, uncut, f"{part} in {shards} shards")


@given(data=st.data())
def test_permuting_tokens_permutes_results(subject: Subject, data: st.DataObject) -> None:
    """A token's result has the same bits wherever it stands, and beside whatever tokens."""
    layer, batch = _draw(subject, data, min_tokens=1)
    moe = subject.moe(layer)
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="order"))
    count = data.draw(st.integers(1, len(batch.hidden)), label="tokens kept")
    order = rng.permutation(len(batch.hidden))[:count]
    some = Batch(batch.hidden[order], batch.ids[order], batch.weights[order])
    bounds.check_same_bits(_call(moe, some), _call(moe, batch)[order], "chosen tokens")


@given(data=st.data())
def test_results_are_linear_in_the_routing_weights(subject: Subject, data: st.DataObject) -> None:
    """A power of two is exact in every product and sum."""
    layer, batch = _draw(subject, data)
    assume(not layer.config.apply_router_weight_on_input)
    moe = subject.moe(layer)
    factor = np.float32(data.draw(st.sampled_from([-2.0, 0.25, 8.0]), label="factor"))
    plain = _call(moe, batch)
    scaled = _call(moe, Batch(batch.hidden, batch.ids, batch.weights * factor))
    # Where a result or a term of it is subnormal, the smallest steps get in the way.
    tiny = (np.abs(plain) < 2.0**-100) & (plain != 0)
    assume(not tiny.any())
    # Adding zero makes all zeros alike: a sum of nothing has no sign to change.
    bounds.check_same_bits(scaled + 0, plain * factor + 0, f"weights times {factor}")


@given(data=st.data())
def test_skipped_experts_contribute_nothing(subject: Subject, data: st.DataObject) -> None:
    """A masked expert, and an id outside the range, are as good as no expert."""
    layer, batch = _draw(subject, data)
    moe = subject.moe(layer)
    experts = layer.config.num_experts
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="mask"))
    mask = rng.random(experts) < 0.5
    result = _call(moe, batch, mask=mask)
    known = (batch.ids >= 0) & (batch.ids < experts)
    hidden_by_mask = known & mask[np.where(known, batch.ids, 0)]
    for nothing in (-1, layer.config.num_ids, np.iinfo(np.int32).min):
        ids = np.where(hidden_by_mask, nothing, batch.ids)
        same = _call(moe, Batch(batch.hidden, ids, batch.weights))
        bounds.check_same_bits(same, result, f"id {nothing} in place of masked experts")
    expected = subject.expected(moe, layer, batch, mask=mask)
    bounds.check(result, expected.value, expected.error, "output with a mask")


@given(data=st.data())
def test_a_repeated_expert_counts_twice(subject: Subject, data: st.DataObject) -> None:
    """The same expert in two slots adds both weights."""
    layer, batch = _draw(subject, data, min_tokens=1)
    expert = data.draw(st.integers(0, layer.config.num_experts - 1), label="expert")
    repeated = Batch(batch.hidden, np.full_like(batch.ids, expert), batch.weights)
    moe = subject.moe(layer)
    expected = subject.expected(moe, layer, repeated)
    bounds.check(_call(moe, repeated), expected.value, expected.error, "output")


@given(data=st.data())
def test_no_work_gives_zeros(subject: Subject, data: st.DataObject) -> None:
    """No tokens give no rows; no active expert gives rows of zeros."""
    layer, batch = _draw(subject, data)
    moe = subject.moe(layer)
    assert _call(moe, Batch(batch.hidden[:0], batch.ids[:0], batch.weights[:0])).shape[0] == 0
    idle = _call(moe, Batch(batch.hidden, np.full_like(batch.ids, -1), batch.weights))
    assert not idle.any()
    experts = layer.config.num_experts
    of_experts = np.where(batch.ids < experts, batch.ids, -1)
    all_masked = _call(
        moe, Batch(batch.hidden, of_experts, batch.weights), mask=np.ones(experts, bool)
    )
    assert not all_masked.any()


@given(data=st.data())
def test_zero_experts_return_what_goes_in(subject: Subject, data: st.DataObject) -> None:
    """They add routing weights times x, as the caller gave it, once: whatever shares the work."""
    layer, batch = _draw(subject, data, min_tokens=1)
    # With experts, no fewer than a token has slots.
    least = max(1, layer.config.num_experts_per_tok - layer.config.num_experts)
    count = data.draw(st.integers(least, least + 2), label="zero experts")
    layer = dataclasses.replace(
        layer, config=dataclasses.replace(layer.config, zero_expert_num=count)
    )
    config = layer.config
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of zero experts"))
    some = rng.integers(config.num_experts, config.num_ids, batch.ids.shape)
    mixed = np.where(rng.random(batch.ids.shape) < 0.5, some, batch.ids)
    mask = np.ones(config.num_experts, bool)
    for shards in range(1, min(2, layer.most_shards) + 1):
        moe = subject.moe(layer, threads=3, shards=shards)
        beside = Batch(batch.hidden, mixed, batch.weights)
        expected = subject.expected(moe, layer, beside)
        bounds.check(_call(moe, beside), expected.value, expected.error, "beside experts")
        # Nothing is encoded, so that one product is left, rounded once.
        alone = np.full_like(batch.ids, -1)
        slot = int(rng.integers(batch.ids.shape[1]))
        alone[:, slot] = some[:, slot]
        got = _call(moe, Batch(batch.hidden, alone, batch.weights), mask=mask)
        with np.errstate(all="ignore"):
            product = batch.hidden * batch.weights[:, slot : slot + 1]
        bounds.check_same_bits(got + 0, product + 0, "a zero expert alone")
        # A token with experts beside it has the same bits.
        alone[0] = batch.ids[0]
        among = _call(moe, Batch(batch.hidden, alone, batch.weights))
        bounds.check_same_bits(among[1:], got[1:], "a zero expert beside other tokens")


@given(data=st.data())
def test_out_is_written_and_nothing_else(subject: Subject, data: st.DataObject) -> None:
    """The result goes where the caller says, and every input is left as it was."""
    layer, batch = _draw(subject, data)
    moe = subject.moe(layer)
    expected = _call(moe, batch)
    guard = 4
    tokens = len(batch.hidden)
    around = np.full((tokens + 2 * guard, batch.hidden.shape[1]), np.nan, np.float32)
    inputs = [array.copy() for array in (batch.hidden, batch.ids, batch.weights)]
    moe(batch.hidden, batch.ids, batch.weights, out=around[guard : guard + tokens])
    bounds.check_same_bits(around[guard : guard + tokens], expected, "out")
    assert np.isnan(around[:guard]).all(), "rows before `out` were written"
    assert np.isnan(around[guard + tokens :]).all(), "rows behind `out` were written"
    now: tuple[npt.ArrayLike, ...] = (batch.hidden, batch.ids, batch.weights)
    for before, after in zip(inputs, now, strict=True):
        bounds.check_same_bits(after, before, "an input")


@given(data=st.data())
def test_dtypes_of_the_caller(subject: Subject, data: st.DataObject) -> None:
    """bf16, f16 and f32 activations, int32 and int64 ids, f32 and bf16 weights mean the same."""
    layer, batch = _draw(subject, data)
    element = data.draw(st.sampled_from(sorted(FLOAT_DTYPES)), label="hidden")
    weight_type = data.draw(st.sampled_from(["f32", "bf16"]), label="weights")
    id_type = data.draw(st.sampled_from([torch.int32, torch.int64]), label="ids")
    hidden = torch.from_numpy(np.clip(batch.hidden, -60000, 60000)).to(FLOAT_DTYPES[element])
    weights = torch.from_numpy(batch.weights).to(FLOAT_DTYPES[weight_type])
    moe = subject.moe(layer)
    result = moe(hidden, torch.from_numpy(batch.ids).to(id_type), weights)
    assert isinstance(result, torch.Tensor)
    assert result.dtype == hidden.dtype
    same = Batch(hidden.float().numpy(), batch.ids, weights.float().numpy())
    expected = subject.expected(moe, layer, same, out=element)
    got = formats.as_float64(result)
    bounds.check(got, expected.value, expected.error, f"output as {element}")


@given(data=st.data())
def test_nan_stays_in_its_token(subject: Subject, data: st.DataObject) -> None:
    """A token that is not finite leaves all others alone."""
    layer, batch = _draw(subject, data, min_tokens=2)
    moe = subject.moe(layer)
    expected = _call(moe, batch)
    row = data.draw(st.integers(0, len(batch.hidden) - 1), label="token")
    column = data.draw(st.integers(0, batch.hidden.shape[1] - 1), label="column")
    hidden = batch.hidden.copy()
    hidden[row, column] = data.draw(st.sampled_from([np.nan, np.inf]), label="value")
    result = _call(moe, Batch(hidden, batch.ids, batch.weights))
    others = np.arange(len(hidden)) != row
    bounds.check_same_bits(result[others], expected[others], f"tokens beside token {row}")
    active = (batch.ids[row] >= 0) & (batch.ids[row] < layer.config.num_experts)
    if active.any() and layer.config.activation == "silu" and np.isnan(hidden[row, column]):
        assert np.isnan(result[row]).all(), f"token {row} lost its NaN"


@given(data=st.data())
def test_submitted_work_gives_the_same_bits(subject: Subject, data: st.DataObject) -> None:
    """A ticket holds what a call returns, whatever happens to the inputs meanwhile."""
    layer, batch = _draw(subject, data)
    moe = subject.moe(layer)
    expected = _call(moe, batch)
    inputs = [array.copy() for array in (batch.hidden, batch.ids, batch.weights)]
    ticket = moe.submit(*inputs)
    for array in inputs:
        array.fill(0)
    result = np.asarray(ticket.wait())
    assert ticket.done
    bounds.check_same_bits(result, expected, "result of the ticket")
