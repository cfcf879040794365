"""A layer in one call is what its parts are, whatever was changed since it was first called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import tiny
import torch
from tiny import FAMILIES
from torch import nn
from transformers import DynamicCache

import ktk.transformers
from ktk.lora import Lora
from ktk.transformers.adapter import put_lora, remove_lora
from ktk.transformers.decoder_layers import FastLayer
from ktk.transformers.swap import take_from_class
from ktk.transformers.whole_layers import WholeLayer

Change = Callable[[Any], Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model"))
    return ktk.transformers.load(folder, linears="BF16", head="BF16")


@pytest.fixture
def layer(model: Any) -> Any:
    """Return a layer that has computed a token in one call."""
    made = copy.deepcopy(model.model.layers[0])
    made.self_attn.config = copy.deepcopy(made.self_attn.config)
    decode(model, made)
    assert isinstance(made.ktk_whole, WholeLayer)
    return made


def decode(model: Any, layer: Any) -> torch.Tensor:
    """Return what a layer makes of a token behind another."""
    rows = torch.randn(2, 1, 1, tiny.H, generator=torch.Generator().manual_seed(0)).bfloat16()
    cache = DynamicCache()
    with torch.no_grad():
        for at, row in enumerate(rows):
            turn = model.model.rotary_emb(row, torch.tensor([[at]]))
            found: torch.Tensor = layer(
                row, position_embeddings=turn, attention_mask=None, past_key_values=cache
            )
    return found


def holds(layer: Any) -> bool:
    with torch.no_grad():
        return bool(layer.ktk_whole.holds_for(layer, torch.bfloat16))


def scale(part: str, layer: Any) -> None:
    module = layer.get_submodule(part)
    real = module.forward
    module.forward = lambda *args, **kwargs: 2 * real(*args, **kwargs)


def give_weight(part: str, layer: Any) -> None:
    module = layer.get_submodule(part)
    module.weight = nn.Parameter(1.5 * module.weight.detach())


def move_weight(part: str, layer: Any) -> None:
    weight = layer.get_submodule(part).weight
    weight.data = 1.5 * weight.detach()


def put_copy(part: str, layer: Any) -> None:
    layer.set_submodule(part, copy.deepcopy(layer.get_submodule(part)))


def hook(part: str, layer: Any) -> None:
    layer.get_submodule(part).register_forward_hook(double)


def double(_: Any, args: Any, out: Any) -> Any:
    """Return twice the floats that a module returns."""
    if isinstance(out, tuple):
        return tuple(double(_, args, one) for one in out)
    return out * 2 if isinstance(out, torch.Tensor) and out.is_floating_point() else out


def adapt(layer: Any) -> None:
    experts = layer.mlp.experts
    i = experts.ktk_packed.moe.config.intermediate_size
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate_a": (2, tiny.H), "gate_b": (i, 2), "up_a": (2, tiny.H), "up_b": (i, 2)}
    shapes |= {"down_a": (2, i), "down_b": (tiny.H, 2)}
    number = experts.ktk_packed.moe.config.num_experts
    factors = {
        name: torch.randn(number, *shape, generator=generator) for name, shape in shapes.items()
    }
    put_lora(experts, Lora(**factors, scale=1.0))


PARTS = (
    "input_layernorm",
    "self_attn",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp",
    "mlp.gate",
    "mlp.experts",
)
WEIGHTS = (
    "input_layernorm",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "post_attention_layernorm",
    "mlp.gate",
)
FORWARDS = ("input_layernorm", "self_attn.o_proj", "mlp", "mlp.experts")
CHANGES: dict[str, Change] = {
    "fewer experts": lambda x: setattr(x.mlp.gate, "top_k", 1),
    "training attention": lambda x: x.self_attn.train(),
    "training experts": lambda x: x.mlp.train(),
    "eager": lambda x: setattr(x.self_attn.config, "_attn_implementation", "eager"),
    "adapter": adapt,
    "layer's number": lambda x: setattr(x.self_attn, "layer_idx", 1),
    **{f"forward of {part}": partial(scale, part) for part in FORWARDS},
    **{f"hook on {part}": partial(hook, part) for part in PARTS},
    **{f"parameter of {part}": partial(give_weight, part) for part in WEIGHTS},
    **{f"memory of {part}": partial(move_weight, part) for part in WEIGHTS},
    **{f"copy of {part}": partial(put_copy, part) for part in PARTS},
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_counts(name: str, model: Any, layer: Any) -> None:
    before = decode(model, layer)
    CHANGES[name](layer)
    assert not holds(layer)
    found = decode(model, layer)
    # A copy has never computed anything, and is made to go the way of transformers.
    stock = copy.deepcopy(layer)
    assert stock.ktk_whole is None
    take_from_class(stock, FastLayer)
    assert torch.equal(found, decode(model, stock))
    if name.split()[0] in ("fewer", "adapter", "forward", "hook", "parameter", "memory"):
        assert not torch.equal(found, before)


def test_values_are_read_anew(model: Any, layer: Any) -> None:
    before = decode(model, layer)
    with torch.no_grad():
        layer.input_layernorm.weight.mul_(1.5)
        layer.mlp.gate.weight.mul_(-1)
    assert holds(layer)
    found = decode(model, layer)
    assert not torch.equal(found, before)
    assert torch.equal(found, decode(model, copy.deepcopy(layer)))


def test_hooks_on_all_modules_count(model: Any, layer: Any) -> None:
    seen: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *x: seen.append(x[0]))
    try:
        decode(model, layer)
    finally:
        handle.remove()
    assert layer.mlp.experts in seen
    assert layer.ktk_whole is None
    decode(model, layer)
    assert holds(layer)


def test_gradients_of_weights_are_for_torch(layer: Any) -> None:
    layer.input_layernorm.weight.requires_grad_(True)
    assert holds(layer)
    assert not layer.ktk_whole.holds_for(layer, torch.bfloat16)
    assert not layer.ktk_whole.holds_for(layer, torch.float32)


def test_adapters_that_went_leave_one_call(model: Any, layer: Any) -> None:
    before = decode(model, layer)
    adapt(layer)
    assert not torch.equal(decode(model, layer), before)
    assert layer.ktk_whole is None
    remove_lora(layer.mlp.experts)
    assert torch.equal(decode(model, layer), before)
    assert holds(layer)


def test_copies_look_for_themselves(model: Any, layer: Any) -> None:
    assert copy.deepcopy(layer).ktk_whole is None
    shallow = copy.copy(layer)
    assert not layer.ktk_whole.holds_for(shallow, torch.bfloat16)
    assert torch.equal(decode(model, shallow), decode(model, layer))
    assert shallow.ktk_whole is not layer.ktk_whole
