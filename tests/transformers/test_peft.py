"""PEFT switches adapters of experts with its own, whichever of them was there first."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import training
from tiny import float32, logits, tokens
from training import gradients, loss_of, off_by, packed, packed_by, randomize

import ktk.sft
from ktk.sft import peft_layers
from ktk.transformers.packed import packed_modules

peft = pytest.importorskip("peft")
folder, model, same_draws = training.folder, training.model, training.same_draws

CONFIG = {"r": 2, "target_modules": ["q_proj"]}
Both = tuple[Any, list[torch.nn.Parameter]]


def _with_peft(model: Any, **options: Any) -> Any:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**CONFIG), **options)
    randomize([one for name, one in wrapped.named_parameters() if "q_proj.lora_B" in name], 1)
    return wrapped


def _experts_first(model: Any) -> Both:
    factors = ktk.sft.add_lora(model, rank=2)
    randomize(factors)
    return _with_peft(model), factors


def _peft_first(model: Any) -> Both:
    wrapped = _with_peft(model)
    factors = ktk.sft.add_lora(wrapped, rank=2)
    randomize(factors)
    return wrapped, factors


ORDERS = {"experts first": _experts_first, "peft first": _peft_first}
orders = pytest.mark.parametrize("make", ORDERS.values(), ids=ORDERS)


@orders
def test_factors_are_trained_and_nothing_of_the_model_is(
    make: Callable[[Any], Both], model: Any
) -> None:
    model, factors = make(model)
    assert all(one.requires_grad for one in factors)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert all("lora_" in name for name in trained)
    assert model.get_model_status().enabled is True
    got = gradients(model, tokens())
    assert got.keys() == trained
    assert all(one.any() for name, one in got.items())
    assert sum(".experts." in name for name in got) == len(factors) == 2 * 6


@orders
def test_disable_adapter_is_the_base_model(make: Callable[[Any], Both], model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    model, factors = make(model)
    trained = logits(model, ids)
    assert not torch.equal(trained, base)
    with model.disable_adapter():
        assert torch.equal(logits(model, ids), base)
        with model.disable_adapter():
            assert torch.equal(logits(model, ids), base)
        assert torch.equal(logits(model, ids), base)
        # What is recorded here has nothing to do with the factors.
        assert not loss_of(model, ids).requires_grad
    assert torch.equal(logits(model, ids), trained)
    with pytest.raises(KeyError, match="planted"), model.disable_adapter():
        raise KeyError("planted")
    assert torch.equal(logits(model, ids), trained)
    assert len(gradients(model, ids)) == len(factors) + 2 * 2


def test_adapters_of_experts_are_off_in_a_block(model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    factors = ktk.sft.add_lora(model, rank=2)
    randomize(factors)
    trained = logits(model, ids)
    with ktk.sft.without_lora(model):
        assert torch.equal(logits(model, ids), base)
        with pytest.raises(KeyError, match="planted"), ktk.sft.without_lora(model):
            raise KeyError("planted")
        assert torch.equal(logits(model, ids), base)
    assert torch.equal(logits(model, ids), trained)
    assert all(one.requires_grad for one in factors)


@orders
def test_blocks_of_both_kinds_go_into_each_other(make: Callable[[Any], Both], model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    model, _ = make(model)
    trained = logits(model, ids)
    with model.disable_adapter():
        with ktk.sft.without_lora(model):
            assert torch.equal(logits(model, ids), base)
        assert torch.equal(logits(model, ids), base)
    with ktk.sft.without_lora(model):
        attention = logits(model, ids)
        with model.disable_adapter():
            assert torch.equal(logits(model, ids), base)
        assert torch.equal(logits(model, ids), attention)
    assert not torch.equal(attention, base)
    assert not torch.equal(attention, trained)
    assert torch.equal(logits(model, ids), trained)


def test_factors_that_come_while_peft_is_off_are_off(model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    model = _with_peft(model)
    with model.disable_adapter():
        randomize(ktk.sft.add_lora(model, rank=2))
        assert torch.equal(logits(model, ids), base)
    with ktk.sft.without_lora(model):
        attention = logits(model, ids)
    assert not torch.equal(logits(model, ids), attention)


@orders
def test_another_adapter_of_peft_is_without_those_of_experts(
    make: Callable[[Any], Both], model: Any
) -> None:
    ids = tokens()
    base = logits(model, ids)
    model, factors = make(model)
    trained = logits(model, ids)
    model.add_adapter("other", peft.LoraConfig(**CONFIG))
    assert all(one.requires_grad for one in factors)
    assert torch.equal(logits(model, ids), trained)
    model.set_adapter("other")  # B is 0
    assert torch.equal(logits(model, ids), base)
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), trained)
    assert all(one.requires_grad for one in factors)
    assert len(gradients(model, ids)) == len(factors) + 2 * 2
    model.set_requires_grad("other", False)
    assert all(one.requires_grad for one in factors)
    model.set_requires_grad("default", False)
    assert not any(one.requires_grad for one in factors)


def test_deleting_an_adapter_takes_its_experts_along(model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    model, _ = _peft_first(model)
    model.add_adapter("other", peft.LoraConfig(**CONFIG))
    model.delete_adapter("default")
    assert not any(".experts." in name for name, _ in model.named_parameters())
    assert torch.equal(logits(model, ids), base)
    randomize(ktk.sft.add_lora(model, rank=2))
    assert not torch.equal(logits(model, ids), base)


def test_a_reference_of_trl_has_no_adapter_that_was_read(model: Any, tmp_path: Path) -> None:
    """TRL means the adapters before the training, which are zeros only if they are new."""
    model, _ = _experts_first(model)
    ktk.sft.save_adapter(model, tmp_path)
    model.add_adapter("ref", peft.LoraConfig(**CONFIG))
    model.set_adapter("ref")
    model.set_adapter("default")
    ktk.sft.load_adapter(model, tmp_path)  # as from a checkpoint: these are still the new ones
    model.set_adapter("ref")
    model.set_adapter("default")
    ktk.sft.remove_lora(model)
    ktk.sft.load_adapter(model, tmp_path)
    with pytest.raises(ValueError, match=re.escape("which copy.deepcopy(model) makes")):
        model.set_adapter("ref")


@pytest.mark.parametrize("again", ["other", "default"])
@pytest.mark.parametrize(
    "method", ["LoraConfig", "LoHaConfig"]
)  # which unload by code of their own
def test_unloading_leaves_the_base_model(model: Any, method: str, again: str) -> None:
    ids = tokens()
    base = logits(model, ids)
    kinds = [type(one) for one in model.modules()]
    randomize(ktk.sft.add_lora(model, rank=2))
    trained = logits(model, ids)
    model = peft.get_peft_model(model, getattr(peft, method)(**CONFIG))
    assert torch.equal(logits(model, ids), trained)
    model = model.unload()
    assert torch.equal(logits(model, ids), base)
    assert [type(one) for one in model.modules()] == kinds
    model = _with_peft(model, adapter_name=again)
    attention = logits(model, ids)
    randomize(ktk.sft.add_lora(model, rank=2))
    assert not torch.equal(logits(model, ids), attention)


def test_merging_and_unloading_merges_experts_too(model: Any, folder: Path) -> None:
    ids = tokens()
    model, _ = _experts_first(model)
    other: Any = ktk.sft.merge(copy_of(model, folder))
    wanted, got = other.merge_and_unload(), model.merge_and_unload()
    assert not any("lora_" in name for name, _ in got.named_parameters())
    assert torch.equal(logits(got, ids), logits(wanted, ids))
    assert not torch.equal(logits(got, ids), logits(packed(folder), ids))


def copy_of(model: Any, folder: Path) -> Any:
    """Return a model with the same adapters, whose experts are its own."""
    made, factors = _experts_first(packed(folder))
    named = dict(model.named_parameters())
    for name, one in made.named_parameters():
        one.data.copy_(named[name])
    assert factors
    return made


def test_adapters_of_codes_stay_beside_what_is_unloaded(folder: Path) -> None:
    ids = tokens()
    model, factors = _peft_first(packed_by("AMXINT8", folder))
    wanted = logits(model, ids)
    with pytest.warns(UserWarning, match="AMXINT8, in codes .* its adapter stays beside it"):
        model = model.merge_and_unload()
    named = [name for name, _ in model.named_parameters() if "lora_" in name]
    assert len(named) == len(factors)
    # Attention is merged in f32; experts store their input in 8 bits, so that roundings may flip.
    assert off_by(logits(model, ids), wanted) < training.forward_error(model)
    with ktk.sft.without_lora(model):
        assert off_by(logits(model, ids), wanted) > training.forward_error(model)
    other = peft.get_peft_model(model, peft.LoraConfig(**CONFIG), adapter_name="other")
    assert off_by(logits(other, ids), wanted) < training.forward_error(model)


@orders
def test_files_of_peft_have_what_is_of_peft(
    make: Callable[[Any], Both], model: Any, tmp_path: Path, folder: Path
) -> None:
    ids = tokens()
    model, _ = make(model)
    state = peft.get_peft_model_state_dict(model)
    assert len(state) == 2 * 2
    assert all("q_proj.lora_" in name for name in state)
    model.save_pretrained(tmp_path / "attention")
    ktk.sft.save_adapter(model, tmp_path / "experts")
    other = packed(folder)
    ktk.sft.load_adapter(other, tmp_path / "experts")
    other = peft.PeftModel.from_pretrained(other, str(tmp_path / "attention"))
    assert torch.equal(logits(other, ids), logits(model, ids))
    stock = peft.PeftModel.from_pretrained(float32(folder), str(tmp_path / "attention"))
    assert stock.get_model_status().enabled is True


def test_an_adapter_for_each_example_is_refused(model: Any) -> None:
    model, ids, names = _with_peft(model).eval(), tokens(2), ["default", "__base__"]
    model(ids, adapter_names=names)
    ktk.sft.add_lora(model, rank=2)
    with pytest.raises(ValueError, match="adapter_names choose an adapter for each example"):
        model(ids, adapter_names=names)


@orders
def test_copies_are_switched_by_themselves(make: Callable[[Any], Both], model: Any) -> None:
    ids = tokens()
    base = logits(model, ids)
    model, _ = make(model)
    trained = logits(model, ids)
    other = copy.deepcopy(model)
    with other.disable_adapter():
        assert torch.equal(logits(model, ids), trained)
        assert torch.equal(logits(other, ids), base)
    assert torch.equal(logits(other, ids), trained)


def test_peft_is_not_needed(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peft_layers, "_kind", lambda: None)
    kinds = [type(one) for one in model.modules()]
    randomize(ktk.sft.add_lora(model, rank=2))
    assert [type(one) for one in model.modules()] == kinds
    trained = logits(model, tokens())
    with ktk.sft.without_lora(model):
        assert not torch.equal(logits(model, tokens()), trained)
    ktk.sft.remove_lora(model)
    assert packed_modules(model)


def test_transformers_own_switch_does_not_reach_experts(model: Any) -> None:
    """As docs/training.md says: it walks other classes than PEFT's own."""
    ids = tokens()
    base = logits(model, ids)
    model.add_adapter(peft.LoraConfig(**CONFIG))
    factors = ktk.sft.add_lora(model, rank=2)
    randomize(factors)
    trained = logits(model, ids)
    model.disable_adapters()
    assert torch.equal(logits(model, ids), trained)
    with ktk.sft.without_lora(model):
        assert torch.equal(logits(model, ids), base)
