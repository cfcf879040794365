"""Packed dense layers as modules: in graphs, copied, saved or refused, with adapters."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from dense_layers import dense
from tiny import Reference
from torch import nn

import ktk
import ktk.transformers
from ktk.hosts.linear import OpLinear
from ktk.transformers.linears import packed_from, put_linear


@pytest.mark.slow
def test_a_graph_of_the_whole_model(saved_tied: Reference) -> None:
    model = dense(tiny.load(saved_tied.folder))
    wanted = tiny.logits(model, saved_tied.ids)
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(saved_tied.ids).logits.double(), wanted)


@pytest.mark.parametrize("name", ["linear", "rows"])
def test_torch_finds_nothing_wrong_with_the_operators(saved_tied: Reference, name: str) -> None:
    model = dense(tiny.load(saved_tied.folder))
    layer = model.lm_head.layer
    arguments: tuple[Any, ...] = (torch.randn(3, 2, tiny.H), layer.number, tiny.VOCABULARY)
    if name == "rows":
        arguments = (tiny.tokens(), layer.number, tiny.H, torch.bfloat16)
    torch.library.opcheck(
        getattr(torch.ops.ktk, name).default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_surrounds_dense_layers_may_change_its_dtype(
    saved_tied: Reference, dtype: torch.dtype
) -> None:
    model = dense(tiny.load(saved_tied.folder)).to(dtype)
    assert model.lm_head.weight.dtype == dtype
    assert saved_tied.error(model).norm() <= (saved_tied.eager - saved_tied.logits).norm()


def test_copies_share_what_is_packed(saved: Reference) -> None:
    model = dense(tiny.load(saved.folder))
    other = copy.deepcopy(model)
    assert other.lm_head.layer is model.lm_head.layer
    assert torch.equal(tiny.logits(other, saved.ids), tiny.logits(model, saved.ids))
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model.lm_head)


@pytest.mark.parametrize("which", ["saved", "saved_tied"])
def test_bf16_is_saved_as_it_was(which: str, request: Any, tmp_path: Path) -> None:
    found = request.getfixturevalue(which)
    dense(tiny.load(found.folder)).save_pretrained(tmp_path)
    stock, again = tiny.load(found.folder).state_dict(), tiny.load(tmp_path).state_dict()
    assert list(again) == list(stock)
    assert all(torch.equal(again[name], one) for name, one in stock.items())


def test_codes_are_not_saved_as_something_else(saved: Reference, tmp_path: Path) -> None:
    model = ktk.transformers.load(saved.folder, linears="AMXINT8")
    with pytest.raises(ValueError, match=r"self_attn.q_proj is packed for AMXINT8.*without loss"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*"))


def test_whoever_wants_the_weight_is_told(saved: Reference) -> None:
    model = dense(tiny.load(saved.folder))
    weight = model.lm_head.weight
    assert (weight.shape, weight.dtype, weight.device.type) == ((320, 128), torch.bfloat16, "cpu")
    for use in (lambda: weight + 1, lambda: weight[0], lambda: weight.normal_()):
        with pytest.raises(RuntimeError, match=r"lm_head.weight is packed by ktk.*options linears"):
            use()


def test_a_dense_layer_has_the_gradient_of_its_weight(saved: Reference) -> None:
    model = ktk.transformers.pack(tiny.load(saved.folder), linears="BF16")
    x = torch.randn(2, tiny.H, requires_grad=True)
    layer = model.model.layers[0].self_attn.q_proj
    layer(x).sum().backward()
    weight = torch.from_numpy(layer.layer.linear.unpack())
    # Ones and weights are bf16 numbers: sums in f32 are all that is rounded.
    bound = len(weight) * 2.0**-24 * weight.abs().sum(0)
    assert x.grad is not None
    assert bool(((x.grad - weight.sum(0)).abs() <= bound).all())


def test_a_bias_is_packed_and_asks_for_no_gradient() -> None:
    stock = nn.Linear(64, 32)
    model, bias = nn.Sequential(stock), nn.Parameter(stock.bias.detach().clone())
    layer = put_linear(model, "0", packed_from(ktk.load_backend("BF16"), stock, "0"))
    assert [name for name, one in model.named_parameters() if one.requires_grad] == []
    assert model.state_dict().keys() == {"0.bias"}
    layer.bias = bias  # as loaders do
    assert not layer.bias.requires_grad


def test_second_derivatives_of_dense_layers_are_refused() -> None:
    linear = ktk.Linear("BF16", 64, 32).load(torch.ones(32, 64))
    layer = OpLinear(linear, "layer")
    x = torch.ones(2, 64, requires_grad=True)
    out = torch.ops.ktk.linear(x, layer.number, 32)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="ktk has first derivatives"):
        grad.square().sum().backward()


def test_adapters_add_to_packed_layers(saved: Reference) -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(dense(tiny.load(saved.folder)), lora)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "lora_" in name:
                one.normal_(std=0.1)
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, tiny.H, dtype=torch.bfloat16)
    with torch.no_grad():
        delta = layer.lora_B["default"](layer.lora_A["default"](x.float()))
        wanted = layer.base_layer(x) + delta * layer.scaling["default"]
        assert torch.equal(layer(x), wanted.bfloat16())
    with pytest.raises(RuntimeError, match="is packed by ktk"):
        model.merge_and_unload()
