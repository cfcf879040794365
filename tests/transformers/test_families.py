"""Models of many families, loaded after one import: nearer to float32 than bf16 of transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import FAMILIES, Reference

import ktk.transformers
from ktk.transformers.layout import is_experts
from ktk.transformers.packed import packed_modules


@functools.cache
def reference(name: str, root: Path) -> Reference:
    folder = FAMILIES[name].save(root / name)
    return Reference.of(folder)


@pytest.fixture(params=FAMILIES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    root = tmp_path_factory.getbasetemp() / "families"
    root.mkdir(exist_ok=True)
    return reference(request.param, root)


def all_packed(model: Any, backend: str) -> bool:
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    packed = packed_modules(model)
    names = {one.moe.backend.name for one in packed.values()}
    return bool(experts) and list(packed) == experts and names == {backend}


def test_bf16_is_as_near_to_float32_as_transformers_is(saved: Reference) -> None:
    model = tiny.load(saved.folder, experts_implementation="ktk")
    assert model.dtype == torch.bfloat16
    assert all_packed(model, "BF16")
    error = saved.error(model)
    stock = saved.error(tiny.load(saved.folder, experts_implementation="eager"))
    assert error.norm() <= stock.norm()
    # Wherever that decides which token comes next, the same one does.
    first, second = saved.logits.topk(2).values.unbind(-1)
    sure = first - second > 2 * stock.abs().amax()
    chosen = (saved.logits + error).argmax(-1)
    assert sure.any()
    assert torch.equal(chosen[sure], saved.logits.argmax(-1)[sure])


def test_models_in_memory_are_packed_to_the_same_bits(saved: Reference) -> None:
    loaded = tiny.load(saved.folder, experts_implementation="ktk")
    model = tiny.load(saved.folder)
    assert ktk.transformers.pack(model) is model
    assert all_packed(model, "BF16")
    assert torch.equal(tiny.logits(model, saved.ids), tiny.logits(loaded, saved.ids))
    names = [name for name, _ in model.named_parameters()]
    assert not any(name.endswith(("experts.gate_up_proj", "experts.down_proj")) for name in names)


@pytest.mark.slow
def test_a_saved_model_is_the_one_that_was_loaded(saved: Reference, tmp_path: Path) -> None:
    tiny.load(saved.folder, experts_implementation="ktk").save_pretrained(tmp_path)
    stock = tiny.load(saved.folder).state_dict()
    again = tiny.load(tmp_path).state_dict()
    assert list(again) == list(stock)
    assert all(torch.equal(again[name], one) for name, one in stock.items())
    # And ktk reads it, too, as any other checkpoint.
    model = ktk.transformers.load(tmp_path)
    assert all_packed(model, "BF16")
    loaded = tiny.load(saved.folder, experts_implementation="ktk")
    assert torch.equal(tiny.logits(model, saved.ids), tiny.logits(loaded, saved.ids))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3-moe"])
def test_float32_around_the_experts(name: str, tmp_path: Path) -> None:
    found = Reference.of(FAMILIES[name].save(tmp_path))
    model = ktk.transformers.load(tmp_path, dtype=torch.float32)
    assert model.dtype == torch.float32
    # The weights are the same numbers, so nothing but activations is rounded to bf16, at most.
    assert found.error(model).norm() <= (found.eager - found.logits).norm()
