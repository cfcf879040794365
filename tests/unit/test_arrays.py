"""Arrays of any library go into a call, and what does not fit is said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import ktk

TOKENS, HIDDEN = 3, 64


@pytest.fixture(scope="module")
def moe() -> ktk.MoE:
    layer = ktk.load_backend("BF16").moe(
        num_experts=2, num_experts_per_tok=2, hidden_size=HIDDEN, intermediate_size=32
    )
    generator = torch.Generator().manual_seed(0)
    for expert in range(2):
        shapes = {"gate": (32, HIDDEN), "up": (32, HIDDEN), "down": (HIDDEN, 32)}
        weights: dict[str, Any] = {
            k: torch.randn(*s, generator=generator) for k, s in shapes.items()
        }
        layer.load_expert(expert, **weights)
    return layer


@pytest.fixture
def call() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden": torch.randn(TOKENS, HIDDEN, generator=generator),
        "topk_ids": torch.tensor([[0, 1]] * TOKENS),
        "topk_weights": torch.rand(TOKENS, 2, generator=generator),
    }


class Foreign:
    """An array of a library that ktk does not know."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        return self._array.__dlpack__(**keywords)


def test_every_library_gives_the_same_bits(moe: ktk.MoE, call: dict[str, Any]) -> None:
    expected = moe(**call)
    assert expected.abs().max() > 0
    numpy = {name: tensor.numpy() for name, tensor in call.items()}
    from_numpy = moe(**numpy)
    assert isinstance(from_numpy, np.ndarray)
    assert np.array_equal(from_numpy, expected.numpy())
    arrays: dict[str, Any] = {name: Foreign(array) for name, array in numpy.items()}
    foreign = moe(**arrays)
    assert torch.equal(foreign, expected)


def test_rows_may_be_strided_and_out_may_be_hidden(moe: ktk.MoE, call: dict[str, Any]) -> None:
    expected = moe(**call)
    wide = torch.zeros(TOKENS, HIDDEN + 8)
    wide[:, :HIDDEN] = call["hidden"]
    rows = wide[:, :HIDDEN]
    assert torch.equal(moe(**call | {"hidden": rows}), expected)
    assert moe(**call | {"hidden": rows}, out=rows) is rows
    assert torch.equal(rows, expected)
    assert torch.equal(moe.submit(**call).wait(), expected)


def negated(values: torch.Tensor) -> torch.Tensor:
    """Return a view with these values, of memory that has them negated."""
    view = torch.complex(torch.zeros_like(values), -values).conj().imag
    assert view.is_neg()
    return view


def test_a_view_of_negated_memory_has_its_own_values(moe: ktk.MoE, call: dict[str, Any]) -> None:
    view = negated(call["hidden"])
    assert torch.equal(view, call["hidden"])
    assert torch.equal(moe(**call | {"hidden": view}), moe(**call))
    column = torch.randn(64, 1)
    linear = ktk.Linear("BF16", 1, 64).load(negated(column))
    assert np.array_equal(linear.unpack(), column.bfloat16().float().numpy())
    for compute in (moe, moe.submit, moe.forward_train):
        with pytest.raises(ValueError, match="out is a view whose memory has its values negated"):
            compute(**call, out=negated(torch.zeros(TOKENS, HIDDEN)))
    for multiply in (linear, linear.submit):
        with pytest.raises(ValueError, match="out is a view whose memory"):
            multiply(torch.ones(2, 1), out=negated(torch.zeros(2, 64)))


def test_out_may_overlap_hidden(moe: ktk.MoE) -> None:
    rng, tokens = np.random.default_rng(0), 300
    memory = rng.standard_normal((tokens + 1, 2 * HIDDEN)).astype(np.float32)
    ids = np.tile(np.arange(2), (tokens, 1))
    weights = rng.random((tokens, 2)).astype(np.float32)
    for hidden, out in (
        (memory[:-1, :HIDDEN], memory[1:, :HIDDEN]),
        (memory[1:, :HIDDEN], memory[:-1, :HIDDEN]),
        (memory[:-1, :HIDDEN], memory[:-1, HIDDEN:]),  # which share no byte
        (memory.view(np.float16)[:-1, :HIDDEN], memory[:-1, :HIDDEN]),
    ):
        hidden[:] = rng.standard_normal(hidden.shape)
        expected = moe(hidden.copy(), ids, weights, out=np.empty((tokens, HIDDEN), np.float32))
        assert np.array_equal(moe(hidden, ids, weights, out=out), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: None, "hidden must be an array, of any library, got NoneType"),
        (lambda x: "text", "hidden must be an array, of any library, got str"),
        (lambda x: x.double(), "hidden has dtype float64"),
        (lambda x: x.to("meta"), "hidden must be an array in CPU memory .* on meta"),
        (lambda x: x.to_sparse(), "hidden must be an array in CPU memory .* sparse_coo"),
    ],
)
def test_other_things_are_refused(
    moe: ktk.MoE, call: dict[str, Any], change: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        moe(**call | {"hidden": change(call["hidden"])})
