"""Deferred experts against a plain model of what they mean."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ktmoe_layers import E, H, K, inputs, wrapper

from ktk import KTMoEWrapper, _core
from ktk.ktmoe import ModelState
from ktk.ktmoe.deferral import select_deferred

Ids = list[list[int]]
WEIGHTS = st.sampled_from([0.0, 0.1, 0.25, 0.25, 0.5, 0.9, -0.5, math.nan, math.inf])

# Of layers here: they return what goes in, and stay.
ZERO_IDS = range(E, E + 2)


def defined(
    ids: Ids, weights: list[list[float]], experts: int, deferred: int, union: bool
) -> tuple[Ids, Ids]:
    """Choose by the definition, token by token."""

    def rank(token: int) -> list[int]:
        def key(slot: int) -> tuple[bool, float, int]:
            w = weights[token][slot]
            return (not math.isnan(w), 0.0 if math.isnan(w) else -w, slot)

        return sorted(range(len(ids[token])), key=key)

    def protected(token: int) -> set[int]:
        order = rank(token)
        return set(order[: max(len(order) - deferred, 0)])

    flagged = {ids[t][s] for t in range(len(ids)) for s in protected(t)}
    now, later = [], []
    for t, row in enumerate(ids):
        stays = [(i in flagged) if union else (s in protected(t)) for s, i in enumerate(row)]
        valid = [0 <= i < experts for i in row]
        zipped = list(zip(row, stays, valid, strict=True))
        now.append([i if (s and v) or i in ZERO_IDS else -1 for i, s, v in zipped])
        later.append([i if not s and v else -1 for i, s, v in zipped])
    return now, later


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_the_choice_is_the_defined_one(data: st.DataObject) -> None:
    tokens, k = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 6))
    deferred, union = data.draw(st.integers(0, 7)), data.draw(st.booleans())
    row = st.lists(st.integers(-1, ZERO_IDS.stop), min_size=k, max_size=k)
    ids = data.draw(st.lists(row, min_size=tokens, max_size=tokens))
    some = st.lists(WEIGHTS, min_size=k, max_size=k)
    weights = data.draw(st.lists(some, min_size=tokens, max_size=tokens))
    shape = (tokens, k)
    expected = defined(ids, weights, E, deferred, union)
    id_array = np.array(ids, dtype=np.int64).reshape(shape)
    weight_array = np.array(weights, dtype=np.float32).reshape(shape)
    made = _core.split_deferred(id_array, weight_array, E, deferred, union, len(ZERO_IDS))
    in_torch = select_deferred(
        torch.from_numpy(id_array),
        torch.from_numpy(weight_array),
        k - deferred,
        E,
        "batch-union" if union else "per-token",
        len(ZERO_IDS),
    )
    for half in range(2):
        wanted = np.array(expected[half], dtype=np.int64).reshape(shape)
        np.testing.assert_array_equal(made[half], wanted)
        np.testing.assert_array_equal(in_torch[half].numpy(), wanted)


@functools.cache
def chain(deferred: int, policy: str, last: int) -> list[KTMoEWrapper]:
    """Return three layers of one model; the last one may defer as well."""
    state = ModelState()
    return [
        wrapper(
            n,
            seed=n,
            model=state,
            deferral_policy=policy,
            zero_expert_num=len(ZERO_IDS),
            max_deferred_experts_per_token=deferred if n < 2 else last,
        )
        for n in range(3)
    ]


@functools.cache
def plain(layer_idx: int) -> KTMoEWrapper:
    zeros = len(ZERO_IDS)
    return wrapper(layer_idx, seed=layer_idx, model=ModelState(), zero_expert_num=zeros)


def in_f32(layer_idx: int, x: torch.Tensor, ids: Ids, w: torch.Tensor) -> torch.Tensor:
    """Return a layer's sums before they are rounded to bf16."""
    moe = plain(layer_idx).moe
    assert moe is not None
    out = torch.empty(x.shape)
    sums: torch.Tensor = moe(x, torch.tensor(ids).reshape(-1, K), w, out=out)
    return sums


@given(
    st.integers(1, 6),
    st.integers(0, K + 1),
    st.sampled_from(["per-token", "batch-union"]),
    st.booleans(),
    st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_results_carry_what_the_layer_before_deferred(
    tokens: int, deferred: int, policy: str, flush: bool, seed: int
) -> None:
    model = chain(deferred, policy, deferred if flush else 0)
    carried = torch.zeros(tokens, H)
    for n, layer in enumerate(model):
        x, ids, w = inputs(tokens, seed=seed + n)
        ids[(ids + seed) % 3 == 0] = E + n % 2
        count = deferred if n < 2 or flush else 0
        now, later = defined(ids.tolist(), w.tolist(), E, count, policy == "batch-union")
        expected = (in_f32(n, x, now, w) + carried).bfloat16()
        assert torch.equal(layer.forward(x, ids, w), expected)
        carried = in_f32(n, x, later, w)
    left = model[-1].flush()
    if flush and deferred:
        assert left is not None
        assert torch.equal(left, carried)
    else:
        assert left is None


def test_zero_experts_are_added_once_whatever_the_mask_and_the_deferral() -> None:
    """Of a token without experts that are computed here, exactly the weights times x are left."""
    model = chain(2, "per-token", 0)
    x, ids, w = inputs(7)
    ids[:, 0] = ids[:, 2] = E + 1
    w = torch.tensor([0.5, 1.0, 0.25]).expand(7, K).contiguous()
    for layer in model:
        layer.gpu_experts_mask.fill_(True)
        try:
            assert torch.equal(layer.forward(x, ids, w), (0.75 * x.float()).bfloat16())
        finally:
            layer.gpu_experts_mask.fill_(False)


def test_nothing_is_lost_over_a_model() -> None:
    """The sum of all outputs is that of a model that defers nothing, but for rounding to bf16."""
    tokens = 16
    model = chain(2, "per-token", 2)
    total, undeferred, bound = torch.zeros(tokens, H), torch.zeros(tokens, H), 0.0
    for n, layer in enumerate(model):
        x, ids, w = inputs(tokens, seed=n)
        out = layer.forward(x, ids, w).float()
        total += out
        undeferred += in_f32(n, x, ids.tolist(), w)
        bound += 2.0**-8 * out.abs().max().item()
    left = model[0].flush()
    assert left is not None
    # Beside the three roundings to bf16: sums of f32 in another order.
    order = 1e-5 * undeferred.abs().max().item()
    assert (total + left - undeferred).abs().max().item() <= bound + order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_is_left_is_f32_whatever_torchs_default_is(dtype: torch.dtype) -> None:
    model = chain(1, "per-token", 2)
    call = inputs(3)
    model[0].forward(*call)
    expected = model[0].flush()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        # Of another number of tokens, for which there is no buffer yet.
        x, ids, w = (torch.cat([one, one]) for one in call)
        model[0].forward(x, ids, w)
        left = model[0].flush()
    finally:
        torch.set_default_dtype(before)
    assert expected is not None
    assert left is not None
    assert expected.abs().max() > 0
    assert torch.equal(left, torch.cat([expected, expected]))
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _core.Carry(np.zeros((2, H)))  # type: ignore[arg-type]  # a copy would get the sums


def test_the_wrapper_selects_by_its_policy() -> None:
    ids, scores = torch.tensor([[0, 1, 2], [2, 3, 4]]), torch.tensor([[3.0, 2, 1], [3, 1, 2]])
    model = chain(1, "per-token", 0)[0]
    now, later = model.select_deferred_experts(ids, scores, 2)
    assert now.tolist() == [[0, 1, -1], [2, -1, 4]]
    assert later.tolist() == [[-1, -1, 2], [-1, 3, -1]]
    union = chain(1, "batch-union", 0)[0]
    now, later = union.select_deferred_experts(ids, scores, 2)
    assert now.tolist() == [[0, 1, 2], [2, -1, 4]]
    assert later.tolist() == [[-1, -1, -1], [-1, 3, -1]]


def test_a_forgotten_flush_is_an_error_and_then_forgotten() -> None:
    model = chain(1, "per-token", 1)
    x, ids, w = inputs(2)
    for layer in model:
        layer.forward(x, ids, w)
    with pytest.raises(RuntimeError, match=r"layer 0 was called, but .* of layer 2 .* flush\(\)"):
        model[0].forward(x, ids, w)
    model[0].forward(x, ids, w)
    with pytest.raises(RuntimeError, match=r"a call of 5 tokens, but layer 0 left .* of 2"):
        model[1].forward(*inputs(5))
    model[0].forward(x, ids, w)
    model[0].model.reset()
    assert model[0].flush() is None


def test_deferred_experts_do_not_go_to_another_pool() -> None:
    state = ModelState()
    first = wrapper(0, model=state, max_deferred_experts_per_token=1)
    second = wrapper(1, model=state, cpuinfer_threads=1)
    x, ids, w = inputs(3)
    first.submit_forward(x, ids, w)
    first.sync_forward(x)
    with pytest.raises(ValueError, match="on another pool"):
        second.submit_forward(x, ids, w)
    # Nothing is lost: the call may be made again once they were asked for.
    left = state.flush()
    assert left is not None
    assert left.abs().max() > 0
    second.submit_forward(x, ids, w)
    second.sync_forward(x)


def test_layers_between_need_no_experts() -> None:
    state = ModelState()
    far = [
        wrapper(n, seed=n, model=state, max_deferred_experts_per_token=1 if n == 3 else 0)
        for n in (3, 9)
    ]
    x, ids, w = inputs(4)
    outs = [layer.forward(x, ids, w) for layer in far]
    _, later = defined(ids.tolist(), w.tolist(), E, 1, False)
    moved = in_f32(3, x, later, w)
    assert torch.equal(outs[1], (in_f32(9, x, ids.tolist(), w) + moved).bfloat16())


def test_models_keep_what_they_defer_to_themselves() -> None:
    ours = [wrapper(n, seed=n, max_deferred_experts_per_token=1 - n) for n in range(2)]
    theirs = [
        wrapper(n, seed=n, hidden_size=32, max_deferred_experts_per_token=1 - n) for n in range(2)
    ]
    again = [wrapper(n, seed=n, max_deferred_experts_per_token=1 - n) for n in range(2)]
    models = [ours, theirs, again]
    assert len({id(layer.model) for model in models for layer in model}) == 3
    calls = [inputs(3), inputs(3, hidden=32), inputs(3, seed=8)]
    alone = [
        [layer.forward(*call) for layer in model] for model, call in zip(models, calls, strict=True)
    ]
    mixed = [
        [model[n].forward(*call) for model, call in zip(models, calls, strict=True)]
        for n in range(2)
    ]
    for n in range(2):
        for m in range(3):
            assert torch.equal(mixed[n][m], alone[m][n])


def made(numbers: Iterable[int], **options: Any) -> dict[int, KTMoEWrapper]:
    """Make layers of which all but the last, 3, defer."""
    return {
        n: wrapper(n, seed=n, max_deferred_experts_per_token=int(n < 3), **options) for n in numbers
    }


def passed(model: dict[int, KTMoEWrapper]) -> list[torch.Tensor]:
    return [model[n].forward(*inputs(3, seed=n)) for n in sorted(model)]


@pytest.mark.parametrize("tried", range(4))
@pytest.mark.parametrize("defers", [0, 1])
def test_a_layer_tried_before_its_model_loses_nothing(tried: int, defers: int) -> None:
    expected = passed(made(range(4), model=ModelState()))
    probe = wrapper(tried, seed=tried, max_deferred_experts_per_token=defers, hidden_size=H)
    model = made(range(4))
    if tried:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"model=ModelState|were never added"):
                passed(model)
    else:
        assert all(map(torch.equal, passed(model), expected))
    assert probe.layer_idx == tried  # still there


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_a_layer_that_replaces_another_loses_nothing(number: int, kept: bool) -> None:
    model = made(range(4))
    old = model[number]
    model |= made([number])
    if not kept:
        del old
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"model=ModelState|were never added"):
            passed(model)


def test_layers_made_anew_in_any_order_are_one_model() -> None:
    model = made(range(4))
    expected = passed(model)
    for order in ((0, 1, 2, 3), (3, 2, 1, 0)):
        for number in order:
            model |= made([number])
        assert all(map(torch.equal, passed(model), expected))
    del model[2]
    model |= made([2])  # the old one is gone
    assert all(map(torch.equal, passed(model), expected))


def test_a_layer_tried_beside_its_model_leaves_that_alone() -> None:
    model = made(range(4))
    expected = passed(model)
    x, ids, w = inputs(3)
    probe = wrapper(2, seed=2)
    assert torch.equal(probe.forward(x, ids, w), in_f32(2, x, ids.tolist(), w).bfloat16())
    assert all(map(torch.equal, passed(model), expected))


def test_dropping_buffers_keeps_what_was_deferred() -> None:
    first, second, _ = chain(2, "per-token", 0)
    calls = [inputs(4, seed=n) for n in range(2)]
    expected = [layer.forward(*call) for layer, call in zip((first, second), calls, strict=True)]
    second.model.reset()
    made = [first.forward(*calls[0])]
    KTMoEWrapper.clear_buffer_cache()
    made.append(second.forward(*calls[1]))
    second.model.reset()
    for got, wanted in zip(made, expected, strict=True):
        assert torch.equal(got, wanted)
