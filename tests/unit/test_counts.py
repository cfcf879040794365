"""Layers count how often each expert is chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import ktk
from ktk import _core
from ktk.model import Model

E, K, H, INNER = 9, 3, 64, 64


def layer(workers: int = 1, shards: int = 1, experts: int = E) -> ktk.MoE:
    moe = ktk.load_backend("AMXINT8").moe(
        num_experts=experts,
        num_experts_per_tok=K,
        hidden_size=H,
        intermediate_size=INNER,
        pool=_core.WorkerPool(workers),
        shards=shards,
    )
    rng = np.random.default_rng(0)
    for expert in range(experts):
        shapes = ((INNER, H), (INNER, H), (H, INNER))
        moe.load_expert(expert, *(rng.standard_normal(shape, np.float32) for shape in shapes))
    return moe


def inputs(tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-2, E + 3, (tokens, K))  # some are no experts, some come twice
    return rng.standard_normal((tokens, H), np.float32), ids, rng.random((tokens, K), np.float32)


def expected(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids[(ids >= 0) & (ids < E)].ravel(), minlength=E)


CALLS: dict[str, Callable[[ktk.MoE, Any], Any]] = {
    "call": lambda moe, call: moe(*call),
    "int32": lambda moe, call: moe(call[0], call[1].astype(np.int32), call[2]),
    "strided": lambda moe, call: moe(call[0], np.repeat(call[1], 2, 1)[:, ::1][:, :K], call[2]),
    "submit": lambda moe, call: moe.submit(*call).wait(),
    "masked": lambda moe, call: moe(*call, mask=np.arange(E) % 2 == 0),
    "train": lambda moe, call: moe.forward_train(*call),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("tokens", [0, 1, 7, 5000])
def test_choices_are_counted(tokens: int, workers: int, shards: int) -> None:
    moe = layer(workers, shards)
    assert moe.counts.dtype == np.int64
    assert not moe.counts.any()
    call = inputs(tokens)
    y = moe(*call)
    assert np.array_equal(moe.counts, expected(call[1]))
    moe(*inputs(3, 1))
    assert np.array_equal(moe.counts, expected(call[1]) + expected(inputs(3, 1)[1]))
    for token in {0, 4095, 4096, 4999} & set(range(tokens)):  # a chunk has 4096
        one = [given[token : token + 1] for given in call]
        assert np.array_equal(y[token : token + 1], moe(*one)), token
    moe.reset_counts()
    assert not moe.counts.any()


@pytest.mark.parametrize("how", CALLS)
def test_every_kind_of_call_counts_once(how: str) -> None:
    moe, call = layer(2, 2), inputs(20)
    CALLS[how](moe, call)
    ids = np.repeat(call[1], 2, 1)[:, :K] if how == "strided" else call[1]
    assert np.array_equal(moe.counts, expected(ids))


def test_backward_passes_and_calls_that_fail_count_nothing() -> None:
    moe, call = layer(), inputs(20)
    moe.backward(call[0], *call)
    assert not moe.counts.any()
    moe.unload_expert(int(call[1][(call[1] >= 0) & (call[1] < E)][-1]))
    with pytest.raises(RuntimeError, match="is not loaded"):
        moe(*call)
    assert not moe.counts.any()
    moe.leave_out(0)
    moe(call[0][:1], np.array([[0, 0, 0]]), call[2][:1])
    assert moe.counts[0] == 3, "left out, and chosen all the same"


def test_what_is_returned_is_a_copy() -> None:
    moe = layer()
    moe.counts[:] = 7
    assert not moe.counts.any()


def test_a_model_has_counts_of_all_layers() -> None:
    model = Model({7: layer(), 3: layer()})
    call = inputs(5)
    model[7](*call)
    assert model.layers == (3, 7)
    assert np.array_equal(model.counts, [np.zeros(E), expected(call[1])])
    model.reset_counts()
    assert not model.counts.any()
    assert Model({}).counts.shape == (0, 0)
    with pytest.raises(ValueError, match=r"layers have \[3, 9\] experts"):
        _ = Model({0: layer(), 1: layer(experts=3)}).counts
