"""Attention of one token: heads that share keys are computed together."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from tiny import FAMILIES
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import ktk.transformers
from ktk.transformers import attention

BATCH, HEADS, SHARED, DEPTH, TOKENS = 2, 8, 2, 32, 50


def marked(**also: Any) -> Any:
    return SimpleNamespace(num_key_value_groups=HEADS // SHARED, ktk_shares_keys=True, **also)


def tensors(queries: int = 1, seed: int = 0) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((HEADS, queries), (SHARED, TOKENS), (SHARED, TOKENS))
    return [
        torch.randn(BATCH, heads, rows, DEPTH, generator=made, dtype=torch.float64)
        for heads, rows in shapes
    ]


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Shapes of queries that torch is given."""
    seen: list[torch.Size] = []
    compute = torch.nn.functional.scaled_dot_product_attention

    def spy(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        seen.append(query.shape)
        return compute(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


def call(module: Any, tensors: list[torch.Tensor], mask: Any = None, **options: Any) -> Any:
    given = {"dropout": 0.0, "scaling": 0.2, "is_causal": None} | options
    return ALL_ATTENTION_FUNCTIONS[attention.WRAPPED](module, *tensors, mask, **given)


def test_what_is_wrapped_has_not_moved() -> None:
    """If this fails, look at what transformers' function does that ktk's does not."""
    wrapped = sdpa_attention.sdpa_attention_forward
    known = ["module", "query", "key", "value", "attention_mask", "dropout", "scaling"]
    assert list(inspect.signature(wrapped).parameters) == [
        *known,
        *("is_causal", "position_bias", "cache", "kwargs"),
    ]
    source = inspect.getsource(wrapped)
    assert source.count("kwargs.get(") == 2
    assert all(f'kwargs.get("{name}"' in source for name in attention.OTHER_OPTIONS[:2])
    assert ALL_ATTENTION_FUNCTIONS[attention.WRAPPED] is not wrapped


def test_one_token_is_what_it_was(stock: list[torch.Size]) -> None:
    given = tensors()
    result, weights = call(marked(), given)
    other, _ = call(SimpleNamespace(num_key_value_groups=HEADS // SHARED), given)
    assert stock == [(BATCH, SHARED, HEADS // SHARED, DEPTH), (BATCH, HEADS, 1, DEPTH)]
    assert weights is None
    assert result.shape == other.shape == (BATCH, 1, HEADS, DEPTH)
    # Each is a mean of values, whose weights are exp of sums of DEPTH products: a score has at most
    # DEPTH + 1 roundings of what its products add up to, a weight as much relatively, twice.
    query, key, value = given
    products = (query.abs().amax() * key.abs().amax() * DEPTH * 0.2).item()
    roundings = 2 * (DEPTH + 1) * products + TOKENS + 10
    bound = 2 * roundings * 2.0**-53 * value.abs().amax()
    assert (result - other).abs().amax() <= bound
    assert bound < 1e-10


@pytest.mark.parametrize(
    "other",
    [
        {"module": SimpleNamespace(num_key_value_groups=HEADS // SHARED)},
        {"queries": 3},
        {"mask": torch.zeros(BATCH, 1, 1, TOKENS, dtype=torch.float64)},
        {"dropout": 0.5},
        {"position_bias": torch.zeros(1, HEADS, 1, TOKENS, dtype=torch.float64)},
    ],
)
def test_all_else_is_left_to_transformers(
    other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = other.pop("module", None) or marked()
    given = tensors(other.pop("queries", 1))
    mask = other.pop("mask", None)
    monkeypatch.setattr(attention, "_shared", lambda *_: pytest.fail("not for ktk"))
    result, _ = call(module, given, mask, **other)
    assert result.shape == (BATCH, given[0].shape[2], HEADS, DEPTH)


def test_models_of_ktk_use_it_and_others_do_not(tmp_path: Path, stock: list[torch.Size]) -> None:
    folder = FAMILIES["qwen3-moe"].save(tmp_path)
    ids = tiny.tokens(length=5)[:1]
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    tokens = []
    for model in (
        tiny.load(folder, dtype=torch.float32),
        ktk.transformers.load(folder, dtype=torch.float32),
    ):
        stock.clear()
        tokens.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options))
        config = model.config
        groups = config.num_attention_heads // config.num_key_value_heads
        rows = {shape[2] for shape in stock[config.num_hidden_layers :]}
        assert rows == {1 if len(tokens) == 1 else groups}
    assert tokens[0].shape == tokens[1].shape
