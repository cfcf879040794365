"""Attention of one token as one call: what a model computes, and a cache that nobody can tell."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import FAMILIES
from transformers import DynamicCache, StaticCache

import ktk.transformers
from ktk import _core
from ktk.transformers import attention, steps
from ktk.transformers.room import room_of
from ktk.transformers.steps import FastAttention, speed_up_attention

HAVE = ("qwen3-moe", "mixtral", "olmoe", "glm-4-moe", "minimax-m2", "aria")
HAVE_NOT = ("gpt-oss", "deepseek-v3", "qwen3-next")


def load(name: str, folder: Path, **options: Any) -> Any:
    saved = FAMILIES[name].save(folder)
    return ktk.transformers.load(saved, linears="BF16", head="BF16", **options)


def fast(model: Any) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, FastAttention)]


def without(model: Any) -> Any:
    """Return a model whose attention is as transformers has it."""
    made = copy.deepcopy(model)
    for one in fast(made):
        one.__class__ = type(one).__mro__[2]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load("qwen3-moe", tmp_path_factory.mktemp("model"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions that ktk computes."""
    seen: list[int] = []
    real = steps.Call.arguments

    def spy(self: steps.Call) -> tuple[Any, ...]:
        seen.append(self.room.filled)
        return real(self)

    monkeypatch.setattr(steps.Call, "arguments", spy)
    return seen


@pytest.mark.parametrize("name", HAVE)
def test_attention_that_ktk_has(name: str, tmp_path: Path, calls: list[int]) -> None:
    model = load(name, tmp_path)
    assert len(fast(model)) == 2
    calls.clear()
    ids = tiny.tokens(rows=1, length=5)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        for step in range(3):
            one = model(ids[:, step : step + 1], past_key_values=past, use_cache=True)
            assert one.logits.isfinite().all()
    assert calls == [5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize("name", HAVE_NOT)
def test_attention_that_it_has_not(name: str, tmp_path: Path) -> None:
    assert not fast(load(name, tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200, 2100])
def test_what_is_attended_to(dtype: torch.dtype, tokens: int) -> None:
    """Rows of keys and values have the bits of the layers; a mean of values is off by roundings."""
    heads, shared, depth, width = 6, 2, 32, 64
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v, out = (
        ktk.Linear("BF16", columns, rows).load(random(rows, columns) / columns**0.5)
        for rows, columns in (
            (heads * depth, width),
            (shared * depth, width),
            (shared * depth, width),
            (width, heads * depth),
        )
    )
    kind = (1e-6, 0.0, True)
    layers = (q._core, k._core, v._core, out._core)
    core = _core.AttentionStep(*layers, heads, shared, depth, 0.2, kind, kind)
    keys, values = (random(1, shared, tokens + 2, depth).to(dtype) for _ in range(2))
    before = keys.clone(), values.clone()
    x = random(1, 1, width).to(dtype)
    norms = [random(depth).to(dtype) for _ in range(2)]
    cos, sin = (random(depth).to(dtype) for _ in range(2))
    found, projected = torch.empty(1, 1, heads * depth, dtype=dtype), torch.empty_like(x)
    given = (x, cos, sin, norms[0], norms[1], keys, values, tokens - 1)
    core.forward(*given, found, False)
    core.forward(*given, projected, True)
    assert torch.equal(projected, out(found))
    turned = []
    for layer, norm, count in ((q, norms[0], heads), (k, norms[1], shared)):
        rows = layer(x).view(1, 1, count, depth)
        normed = torch.empty_like(rows)
        _core.rms_norm(rows, norm, normed, *kind)
        turned.append(normed)
    rotated = [torch.empty_like(one) for one in turned]
    _core.rotate(turned[0], turned[1], cos, sin, rotated[0], rotated[1])
    for now, old, row in ((keys, before[0], rotated[1]), (values, before[1], v(x))):
        assert torch.equal(now[0, :, tokens - 1], row.view(shared, depth))
        old[:, :, tokens - 1] = now[:, :, tokens - 1]
        assert torch.equal(now, old)
    query = rotated[0].view(1, heads, 1, depth)
    past = keys[:, :, :tokens], values[:, :, :tokens]
    assert steps._is_attention(found, query, *past, 0.2)
    # The bound can fail: another query, one token less.
    other = torch.roll(query, 1, dims=3)
    if tokens > 1:
        assert not steps._is_attention(found, other, *past, 0.2)
    if 1 < tokens < 100:
        cut = past[0][:, :, 1:], past[1][:, :, 1:]
        assert not steps._is_attention(found, query, *cut, 0.2)


def test_nan_and_infinities_stay_in_their_heads() -> None:
    heads, shared, depth, width = 4, 2, 32, 64
    q, k, v, out = (
        ktk.Linear("BF16", columns, rows).load(np.ones((rows, columns), np.float32))
        for rows, columns in ((128, width), (64, width), (64, width), (width, 128))
    )
    layers = (q._core, k._core, v._core, out._core)
    core = _core.AttentionStep(*layers, heads, shared, depth, 0.1, None, None)
    keys, values = torch.randn(2, 1, shared, 100, depth)
    values[0, 0, 3, 5] = torch.nan
    keys[0, 1, 70, 2] = torch.nan
    found = torch.empty(1, 1, heads * depth)
    x = torch.ones(1, 1, width)
    core.forward(x, None, None, None, None, keys, values, 99, found, False)
    found = found.view(heads, depth)
    assert found[:2].isnan().sum() == 2
    assert found[2:].isnan().all()


def states(model: Any, ids: torch.Tensor, calls: int) -> tuple[Any, list[torch.Tensor]]:
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        return past, [
            model(ids[:, i : i + 1], past_key_values=past, use_cache=True).logits
            for i in range(calls)
        ]


def test_logits_are_those_of_a_model_without(model: Any) -> None:
    """In f32 both have the same formula, and differ by roundings only."""
    single = copy.deepcopy(model).float()
    ids = tiny.tokens(rows=1, length=6)
    _, mine = states(single, ids, 5)
    _, theirs = states(without(single), ids, 5)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)


def test_what_was_shown_never_changes(model: Any) -> None:
    """Keys that somebody kept, and copies of a cache, are as they were whatever is computed."""
    ids = tiny.tokens(rows=1, length=6)
    past, _ = states(model, ids, 2)
    kept = [(one.keys, one.values) for one in past.layers]
    before = [(k.clone(), v.clone()) for k, v in kept]
    deep, shallow = copy.deepcopy(past), copy.copy(past)
    shallow.layers = [copy.copy(one) for one in past.layers]

    def more(cache: Any, token: int) -> Any:
        with torch.no_grad():
            given = torch.tensor([[token]])
            return model(given, past_key_values=cache, use_cache=True).logits

    first = more(past, 3)
    assert torch.equal(more(deep, 3), first)
    assert not torch.equal(more(shallow, 4), first)
    past.crop(-1)
    assert torch.equal(more(past, 3), first)
    past.crop(-2)
    more(past, 5)
    for (k, v), (k0, v0) in zip(kept, before, strict=True):
        assert torch.equal(k, k0)
        assert torch.equal(v, v0)


def test_memory_is_taken_for_many_tokens_at_once() -> None:
    cache = DynamicCache()
    cache.update(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), 0)
    layer: Any = cache.layers[0]
    places = set()
    for token in range(3, 300):
        room = room_of(layer)
        assert room.filled == token
        room.keys[:, :, token] = room.values[:, :, token] = token
        room.show(layer)
        places.add(layer.keys.data_ptr())
    assert torch.equal(layer.keys[0, 0, 3:, 0], torch.arange(3.0, 300.0))
    assert len(places) <= 5


@pytest.mark.parametrize("what", ["batch", "padding", "static", "hook", "training", "eager"])
def test_other_calls_are_left_to_transformers(
    what: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model)
    monkeypatch.setattr(steps.Call, "arguments", lambda *_, **__: pytest.fail("not for ktk"))
    ids = tiny.tokens(rows=2 if what == "batch" else 1, length=5)
    mask = torch.ones_like(ids)
    cache: Any = None
    if what == "padding":
        mask[0, :2] = 0
    if what == "static":
        cache = StaticCache(config=model.config, max_cache_len=8)
    if what == "hook":
        for one in fast(model):
            one.k_norm.register_forward_hook(lambda *_: None)
    if what == "training":
        model.train()
    if what == "eager":
        model.set_attn_implementation("eager")
    options: dict[str, Any] = {"past_key_values": cache, "pad_token_id": 0, "do_sample": False}
    made = model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, **options)
    assert made.shape[1] == 8


@pytest.mark.slow
def test_compiled_models_take_turns_with_ktk(model: Any, calls: list[int]) -> None:
    """torch.compile traces the stock forward, and a cache goes from one to the other."""
    single = copy.deepcopy(model).float()
    compiled = torch.compile(single, fullgraph=True, backend="aot_eager")
    ids = tiny.tokens(rows=1, length=5)
    past, wanted = states(single, ids, 4)
    other, found = states(single, ids, 1)
    calls.clear()
    with torch.no_grad():
        for number, one in enumerate((compiled, single, compiled), 1):
            given = ids[:, number : number + 1]
            found.append(one(given, past_key_values=other, use_cache=True).logits)
    assert calls == [7] * len(fast(single))
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)
    assert past.get_seq_length() == other.get_seq_length() == 9


def test_layers_that_were_replaced_are_left_to_transformers_until_it_is_asked_again(
    model: Any, calls: list[int]
) -> None:
    model = copy.deepcopy(model)
    ids = tiny.tokens(rows=1, length=5)
    for one in fast(model):
        one.q_proj, one.o_proj = copy.copy(one.q_proj), copy.copy(one.o_proj)
        one.q_proj.layer = type(one.q_proj.layer)(one.q_proj.layer.linear, "another")
    states(model, ids, 1)
    assert not calls
    speed_up_attention(model)
    calls.clear()
    states(model, ids, 1)
    assert len(calls) == 2


def test_a_model_that_clamps_is_asked_with_large_numbers(tmp_path: Path) -> None:
    folder = FAMILIES["olmoe"].save(tmp_path)
    options = {"linears": "BF16", "head": "BF16"}
    assert fast(ktk.transformers.load(folder, **options))
    assert not fast(ktk.transformers.load(folder, clip_qkv=8.0, **options))


def test_the_name_of_the_implementation_is_where_it_was(model: Any) -> None:
    assert attention.implementation(model.config) == model.config._attn_implementation == "sdpa"
    found = vars(model.config)
    assert "_attn_implementation_internal" in found


def test_errors_name_the_argument() -> None:
    q, k, v, out = (
        ktk.Linear("BF16", columns, rows).load(np.ones((rows, columns), np.float32))
        for rows, columns in ((128, 64), (64, 64), (64, 64), (64, 128))
    )
    layers = (q._core, k._core, v._core, out._core)
    with pytest.raises(ValueError, match="multiple of the heads"):
        _core.AttentionStep(*layers, 4, 3, 32, 0.1, None, None)
    with pytest.raises(ValueError, match="other widths than its heads"):
        _core.AttentionStep(*layers, 4, 4, 32, 0.1, None, None)
    wide = ktk.Linear("BF16", 128, 64).load(np.ones((64, 128), np.float32))._core
    with pytest.raises(ValueError, match="one input and one pool"):
        _core.AttentionStep(layers[0], wide, *layers[2:], 4, 2, 32, 0.1, None, None)
    core = _core.AttentionStep(*layers, 4, 2, 32, 0.1, None, None)
    x, past, found = torch.ones(1, 1, 64), torch.zeros(1, 2, 4, 32), torch.empty(1, 1, 64)

    def call(**changes: Any) -> None:
        given: dict[str, Any] = {"x": x, "keys": past, "values": past.clone(), "position": 3}
        given |= dict.fromkeys(("cosine", "sine", "q_norm", "k_norm"))
        core.forward(**(given | {"out": found, "project": True} | changes))

    call()
    for changes, message in (
        ({"x": torch.ones(1, 2, 64)}, "x must be one row"),
        ({"position": 4}, "keys has no row 4"),
        ({"values": past.half()}, "values must have the dtype of x"),
        ({"cosine": torch.ones(32)}, "cosine and sine must both be given"),
        ({"cosine": torch.ones(3), "sine": torch.ones(3)}, "even number of values"),
        ({"q_norm": torch.ones(32)}, "q_norm must be given where"),
        ({"keys": torch.zeros(1, 1, 4, 32).expand(1, 2, 4, 32)}, "keys must not overlap itself"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            call(**changes)
