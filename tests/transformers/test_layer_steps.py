"""Routers with their experts, and sums with norms, as one call each: the bits that modules give."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import FAMILIES
from transformers import DynamicCache

import ktk.transformers
from ktk import _core
from ktk.transformers import decoder_layers, moe_blocks
from ktk.transformers.decoder_layers import FastLayer, is_layer
from ktk.transformers.moe_blocks import FastBlock, is_block
from ktk.transformers.packed import packed_modules
from ktk.transformers.swap import add_to_class
from ktk.transformers.whole_layers import WholeLayer

BLOCKS = ("qwen3-moe", "mixtral", "olmoe")
LAYERS = (*BLOCKS, "deepseek-v3", "glm-4-moe", "minimax-m2", "qwen3-next")
NEITHER = ("gpt-oss", "nemotron-h")


def load(name: str, folder: Path) -> Any:
    return ktk.transformers.load(FAMILIES[name].save(folder), linears="BF16", head="BF16")


def have(model: Any, kind: type) -> list[Any]:
    return [one for one in model.modules() if isinstance(one, kind)]


def without(model: Any, kind: type) -> Any:
    """Return a copy whose modules of a kind are as transformers has them."""
    made = copy.deepcopy(model)
    for one in have(made, kind):
        one.__class__ = type(one).__mro__[2]
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load("qwen3-moe", tmp_path_factory.mktemp("model"))


def decode(model: Any) -> list[torch.Tensor]:
    ids = tiny.tokens(rows=1, length=5)
    with torch.no_grad():
        past = model(ids, use_cache=True).past_key_values
        return [model(ids[:, :1], past_key_values=past, use_cache=True).logits for _ in range(3)]


@pytest.mark.parametrize("name", LAYERS)
def test_models_give_the_same_bits_with_and_without(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name, tmp_path)
    assert have(model, FastLayer)
    assert bool(have(model, FastBlock)) == (name in BLOCKS)
    seen: list[Any] = []
    for call in ("layer_step", "route_and_compute", "add_rms_norm"):
        real = getattr(_core, call)

        def spy(*x: Any, call: str = call, real: Any = real) -> Any:
            seen.append(call)
            return real(*x)

        monkeypatch.setattr(_core, call, spy)
    mine = decode(model)
    assert set(seen) == {"layer_step" if name in BLOCKS else "add_rms_norm"}
    for kind, left in ((FastLayer, BLOCKS), (FastBlock, ())):
        model = without(model, kind)
        seen.clear()
        assert all(map(torch.equal, mine, decode(model)))
        assert ("route_and_compute" in seen) == (name in left)
        assert "layer_step" not in seen


@pytest.mark.parametrize("name", NEITHER)
def test_what_is_something_else_stays(name: str, tmp_path: Path) -> None:
    model = load(name, tmp_path)
    assert not have(model, FastBlock)
    assert not have(model, FastLayer)


def test_a_layer_that_does_more_is_found_out(model: Any) -> None:
    layer = copy.deepcopy(without(model, FastLayer).model.layers[0])
    assert is_layer(layer)
    kind = type(layer)

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super().forward(*args, **kwargs)

    class Quiet(kind):  # type: ignore[misc, valid-type]
        def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    class Swapped(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any, **kwargs: Any) -> Any:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)
            return x + attended + self.mlp(self.post_attention_layernorm(attended))

    for other in (Scaled, Quiet, Swapped):
        layer.__class__ = other
        assert not is_layer(layer)
    assert set(layer._modules) == set(model.model.layers[0]._modules)
    assert not any(isinstance(one, decoder_layers._Asked) for one in layer.modules())


def test_a_block_that_does_more_is_found_out(model: Any) -> None:
    block = copy.deepcopy(without(model, FastBlock).model.layers[0].mlp)
    assert is_block(block)
    kind = type(block)

    class Shared(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any) -> Any:
            return super().forward(x) + x

    class Clamped(kind):  # type: ignore[misc, valid-type]
        def forward(self, x: Any) -> Any:
            return super().forward(x.clamp(-8, 8))

    for other in (Shared, Clamped):
        block.__class__ = other
        assert not is_block(block)
    block.__class__ = kind
    add_to_class(block, FastBlock)
    first = type(block)
    add_to_class(block, FastBlock)
    assert type(block) is first
    assert first.__name__ == kind.__name__


@pytest.mark.parametrize("what", ["rows", "hook on gate", "hook on experts", "training"])
def test_blocks_leave_other_calls_to_the_class(
    what: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = copy.deepcopy(model.model.layers[0].mlp)
    monkeypatch.setattr(_core, "route_and_compute", lambda *_: pytest.fail("not for ktk"))
    x = torch.randn(1, 2 if what == "rows" else 1, tiny.H).bfloat16()
    seen: list[Any] = []
    if what.startswith("hook"):
        one = block.gate if what.endswith("gate") else block.experts
        one.register_forward_hook(lambda *_: seen.append(1))
    if what == "training":
        block.train()
    with torch.no_grad():
        assert block(x).shape == x.shape
    assert bool(seen) == what.startswith("hook")


@pytest.mark.parametrize("where", ["self_attn", "self_attn.q_proj", "mlp", "mlp.experts"])
def test_hooks_inside_a_layer_are_called(
    where: str, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = copy.deepcopy(model.model.layers[0])
    monkeypatch.setattr(_core, "layer_step", lambda *_: pytest.fail("not for ktk"))
    seen: list[Any] = []
    layer.get_submodule(where).register_forward_hook(lambda *_: seen.append(1))
    decode_layer(model, layer)
    assert len(seen) == 2


def decode_layer(model: Any, layer: Any, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return what a layer makes of a token behind another."""
    x = torch.randn(2, 1, 1, tiny.H, generator=torch.Generator().manual_seed(0)).to(dtype)
    cache = DynamicCache()
    with torch.no_grad():
        for at, row in enumerate(x):
            turn = model.model.rotary_emb(row, torch.tensor([[at]]))
            found: torch.Tensor = layer(
                row, position_embeddings=turn, attention_mask=None, past_key_values=cache
            )
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_layer_has_the_bits_of_its_parts(
    dtype: torch.dtype, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = copy.deepcopy(model.model.layers[1]).to(dtype)
    layer.self_attn.layer_idx = 0
    model = copy.deepcopy(model)
    real, seen = _core.layer_step, []

    def spy(*given: Any) -> None:
        seen.append(1)
        real(*given)

    monkeypatch.setattr(_core, "layer_step", spy)
    whole = decode_layer(model, layer, dtype)
    assert seen == [1]  # with the first token there is no cache yet
    assert whole.dtype == dtype
    monkeypatch.setattr(WholeLayer, "__call__", lambda *_, **__: None)
    assert torch.equal(whole, decode_layer(model, layer, dtype))
    assert seen == [1]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"x": torch.zeros(2, tiny.H)}, "x must be one row"),
        ({"before": torch.zeros(tiny.H - 1)}, "before"),
        ({"out": torch.zeros(1, tiny.H, dtype=torch.float16)}, "dtype of x"),
        ({"position": 4}, "keys has no row 4"),
        ({"weight": torch.zeros(4, 8)}, "weight"),
        ({"top_k": 0}, "top_k must be between 1 and 4"),
    ],
)
def test_a_layer_refuses_what_does_not_fit(change: dict[str, Any], what: str, model: Any) -> None:
    layer = model.model.layers[0]
    step = layer.self_attn.ktk_step
    shared, depth = step.shape
    arguments: dict[str, Any] = {
        "attention": step.core,
        "experts": packed_modules(model)["model.layers.0.mlp.experts"].moe._core,
        "x": torch.zeros(1, tiny.H),
        "before": torch.ones(tiny.H),
        "before_kind": (1e-6, 0.0, True),
        "cosine": torch.ones(depth),
        "sine": torch.ones(depth),
        "q_norm": torch.ones(depth),
        "k_norm": torch.ones(depth),
        "keys": torch.zeros(1, shared, 4, depth),
        "values": torch.zeros(1, shared, 4, depth),
        "position": 0,
        "between": torch.ones(tiny.H),
        "between_kind": (1e-6, 0.0, True),
        "weight": torch.zeros(4, tiny.H),
        "bias": None,
        "top_k": 2,
        "chosen_only": True,
        "scores_in_f32": False,
        "out": torch.zeros(1, tiny.H),
    }
    _core.layer_step(**arguments)
    with pytest.raises((ValueError, TypeError), match=what):
        _core.layer_step(**{**arguments, **change})


def test_router_logits_can_still_be_had(model: Any) -> None:
    ids = tiny.tokens(rows=1, length=1)
    with torch.no_grad():
        found = model(ids, output_router_logits=True).router_logits
        states = model(ids, output_hidden_states=True).hidden_states
    assert len(found) == model.config.num_hidden_layers
    assert len(states) == model.config.num_hidden_layers + 1


def test_attention_of_another_dtype_is_added_by_torch(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = copy.deepcopy(model.model.layers[0])
    monkeypatch.setattr(_core, "add_rms_norm", lambda *_: pytest.fail("not for ktk"))
    x = torch.randn(1, 1, tiny.H).bfloat16()
    layer.self_attn = decoder_layers._Asked((torch.randn(1, 1, tiny.H), None))
    layer.mlp = decoder_layers._Asked(torch.zeros(1, 1, tiny.H))
    layer.post_attention_layernorm.float()
    with torch.no_grad():
        assert torch.equal(layer(x), x + layer.self_attn.answer[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3])
def test_sums_and_norms_have_the_bits_of_each(dtype: torch.dtype, tokens: int) -> None:
    a, b = torch.randn(2, tokens, 96).to(dtype)
    weight = torch.randn(96).to(dtype)
    found = torch.empty(4, tokens, 96, dtype=dtype)
    _core.add_rms_norm(a, b, weight, found[0], found[1], 1e-6, 1.0, False)
    torch.add(a, b, out=found[2])
    _core.rms_norm(found[2], weight, found[3], 1e-6, 1.0, False)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_routers_of_any_number_of_workers_have_the_bits_of_one(threads: int, bias: bool) -> None:
    config = ktk.MoEConfig(
        num_experts=10, num_experts_per_tok=3, hidden_size=64, intermediate_size=32
    )
    moe = ktk.MoE(ktk.load_backend("BF16"), config, pool=_core.WorkerPool(threads, pin=False))
    generator = torch.Generator().manual_seed(0)
    gates = torch.randn(10, 3, 32, 64, generator=generator) / 8
    for e, (gate, up, down) in enumerate(gates):
        moe.load_expert(e, gate, up, down.reshape(64, 32))
    x = torch.randn(2, 64, generator=generator).bfloat16()
    weight = torch.randn(10, 64, generator=generator).bfloat16()
    offsets = torch.randn(10, generator=generator).bfloat16() if bias else None
    out = torch.empty_like(x)
    _core.route_and_compute(moe._core, x, weight, offsets, out, 3, True, False)
    logits, scores = torch.empty(2, 10).bfloat16(), torch.empty(2, 3).bfloat16()
    ids: Any = torch.empty(2, 3, dtype=torch.int64)
    _core.route(x, weight, offsets, logits, scores, ids, True)
    assert torch.equal(out, moe(x, ids, scores))
    with pytest.raises(ValueError, match="top_k must be between 1 and 10"):
        _core.route_and_compute(moe._core, x, weight, offsets, out, 11, True, False)
    with pytest.raises(ValueError, match="weight must have shape"):
        _core.route_and_compute(moe._core, x, weight[:, :32], offsets, out, 3, True, False)
    assert moe_blocks.is_block(torch.nn.Linear(2, 2)) is False
