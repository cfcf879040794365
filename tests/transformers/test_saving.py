"""What `save_pretrained` writes of models with packed experts, and what packing leaves alone."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
import transformers
from safetensors.torch import load_file
from tiny import Family

import ktk.sft
import ktk.transformers
from ktk.transformers import modules
from ktk.transformers.packed import packed_modules

QWEN3 = Family("Qwen3MoeForCausalLM")
Tensors = dict[str, torch.Tensor]


def made() -> Any:
    return QWEN3.make().bfloat16().eval()


def written(model: Any, folder: Path, **options: Any) -> Tensors:
    model.save_pretrained(folder, **options)
    return load_file(folder / "model.safetensors")


def at_first_call(model: Any) -> Any:
    model.set_experts_implementation("ktk")
    with torch.no_grad():
        model(tiny.tokens())
    return model


def part(model: Any) -> Any:
    ktk.transformers.pack(model.model)
    return model


def beneath_peft(model: Any) -> Any:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4))
    return ktk.transformers.pack(wrapped).merge_and_unload()


def whole(model: Any) -> Any:
    return ktk.transformers.pack(model)


@pytest.mark.parametrize("pack", [at_first_call, part, beneath_peft, whole])
def test_packed_experts_are_saved(pack: Callable[[Any], Any], tmp_path: Path) -> None:
    model = made()
    wanted = written(copy.deepcopy(model), tmp_path / "stock")
    packed = pack(model)
    assert packed_modules(packed)
    got = written(packed, tmp_path / "ktk")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_a_part_is_saved_with_its_experts(tmp_path: Path) -> None:
    model = made()
    wanted = written(copy.deepcopy(model.model), tmp_path / "stock")
    got = written(whole(model).model, tmp_path / "ktk")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_tensors_that_are_given_are_those_that_are_saved(tmp_path: Path) -> None:
    model = whole(made())
    given = {name: torch.full_like(one, 7) for name, one in model.state_dict().items()}
    got = written(model, tmp_path / "given", state_dict=given)
    assert (got["model.embed_tokens.weight"] == 7).all()
    experts = written(made(), tmp_path / "stock")
    name = "model.layers.0.mlp.experts.0.up_proj.weight"
    assert torch.equal(got[name], experts[name]), "packed experts, of which nothing was given"
    name = "model.layers.0.mlp.experts.gate_up_proj"
    given[name] = torch.full_like(made().state_dict()[name], 7)
    got = written(model, tmp_path / "experts", state_dict=given)
    assert (got["model.layers.0.mlp.experts.0.up_proj.weight"] == 7).all()
    # Not for longer than the call.
    again = written(model, tmp_path / "again")
    embedding = "model.embed_tokens.weight"
    assert torch.equal(again[embedding], experts[embedding])
    # Of a model that ktk has looked at, and computes nothing of.
    dense = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**tiny.COMMON)).bfloat16()
    dense.save_pretrained(tmp_path / "dense")
    loaded = tiny.load(tmp_path / "dense", experts_implementation="ktk")
    given = {name: torch.full_like(one, 7) for name, one in loaded.state_dict().items()}
    assert all(
        (one == 7).all() for one in written(loaded, tmp_path / "7", state_dict=given).values()
    )


def test_another_model_of_the_same_configuration_stays_as_it_is() -> None:
    config = QWEN3.config()
    packed, other = (transformers.Qwen3MoeForCausalLM(config).eval() for _ in range(2))
    ids = tiny.tokens()
    before = tiny.logits(other, ids)
    ktk.transformers.pack(packed)
    assert torch.equal(tiny.logits(other, ids), before)
    assert not packed_modules(other)
    assert packed.config._experts_implementation == "ktk"
    assert packed.model.config is packed.config, "one object, as before"


def test_experts_that_were_to_be_trained_are_said_when_a_call_packs_them(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "_said", set())
    model = made().train()
    with caplog.at_level(logging.WARNING, "ktk.transformers"):
        at_first_call(copy.deepcopy(model))
        assert "not trained any more" not in caplog.text, "nothing is trained under no_grad"
        model.set_experts_implementation("ktk")
        model(tiny.tokens())
    assert "are packed, and not trained any more" in caplog.text


def test_biases_of_packed_experts_ask_for_no_gradient() -> None:
    model = ktk.transformers.pack(Family("GptOssForCausalLM").make().bfloat16())
    model(tiny.tokens()).logits.float().sum().backward()
    without = [
        name for name, one in model.named_parameters() if one.requires_grad and one.grad is None
    ]
    assert not without
    assert [name for name, _ in model.named_parameters() if name.endswith("down_proj_bias")]


@pytest.mark.parametrize("layout", ["peft", "kt", "parameters"])
def test_a_folder_of_peft_is_not_written_over(layout: str, tmp_path: Path) -> None:
    model = whole(made())
    ktk.sft.add_lora(model, rank=4)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], r=4))
    wrapped.save_pretrained(str(tmp_path))
    before = {one.name: one.read_bytes() for one in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"adapter of other layers .*q_proj.* a folder of its own"):
        ktk.sft.save_adapter(wrapped, tmp_path, layout)
    assert {one.name: one.read_bytes() for one in tmp_path.iterdir()} == before
    for _ in range(2):  # what ktk wrote is replaced
        ktk.sft.save_adapter(wrapped, tmp_path / "experts", layout)


def test_modules_that_peft_copies_have_one_adapter(tmp_path: Path) -> None:
    model = whole(made())
    config = peft.LoraConfig(target_modules=["q_proj"], r=4, modules_to_save=["mlp"])
    wrapped = peft.get_peft_model(model, config)
    factors = ktk.sft.add_lora(wrapped, rank=4)
    wrapped(tiny.tokens()).logits.float().sum().backward()
    assert all(one.grad is not None for one in factors)
    ktk.sft.save_adapter(wrapped, tmp_path)
    plain = whole(made())
    ktk.sft.load_adapter(plain, tmp_path)
