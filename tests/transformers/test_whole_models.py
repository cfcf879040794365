"""What else is done with models: copies, graphs, caches, padding, hooks, adapters."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file
from tiny import FAMILIES, Reference

import ktk.transformers
from ktk.transformers.packed import packed_modules, packed_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> Any:
    return tiny.load(folder, experts_implementation="ktk")


@pytest.fixture(scope="module")
def wanted(folder: Path) -> torch.Tensor:
    return tiny.logits(tiny.load(folder, experts_implementation="ktk"), tiny.tokens())


@pytest.mark.slow
def test_a_graph_of_the_whole_model(model: Any, wanted: torch.Tensor) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(tiny.tokens()).logits.double(), wanted)


def test_a_model_that_is_not_packed_says_so_when_it_is_compiled(folder: Path) -> None:
    model = tiny.load(folder)
    model.set_experts_implementation("ktk")
    torch._dynamo.reset()
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(Exception, match=r"call ktk.transformers.pack\(model\)"):
        compiled(tiny.tokens())


def test_copies_share_what_is_packed(model: Any, wanted: torch.Tensor) -> None:
    other = copy.deepcopy(model)
    pairs = zip(packed_modules(model).values(), packed_modules(other).values(), strict=True)
    assert all(one is two for one, two in pairs)
    del model
    assert torch.equal(tiny.logits(other, tiny.tokens()), wanted)


def test_configurations_are_pickled_and_models_say_why_not(model: Any) -> None:
    assert pickle.loads(pickle.dumps(model.config)).to_dict() == model.config.to_dict()
    config = ktk.transformers.KtkConfig("AMXINT4", experts="packed")
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    with pytest.raises(TypeError, match=r"cannot be pickled.*ktk convert"):
        pickle.dumps(model)


@pytest.mark.parametrize("other", ["eager", "grouped_mm", "batched_mm"])
def test_another_implementation_finds_no_tensors_and_says_why(model: Any, other: str) -> None:
    model.set_experts_implementation(other)
    with pytest.raises((AttributeError, RuntimeError), match="is packed by ktk"):
        tiny.logits(model, tiny.tokens())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_surrounds_experts_may_change_its_dtype(
    folder: Path, model: Any, dtype: torch.dtype
) -> None:
    found = Reference.of(folder)
    # Both have at least as many digits as bf16.
    assert found.error(model.to(dtype)).norm() <= (found.eager - found.logits).norm()


def test_all_caches_give_the_same_tokens(folder: Path) -> None:
    # Attention over a cache adds up in another order: in float32, that moves no token elsewhere.
    model = ktk.transformers.load(folder, dtype=torch.float32)
    ids = tiny.tokens(length=9)
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    options["attention_mask"] = torch.ones_like(ids)
    plain = model.generate(ids, use_cache=False, **options)
    assert plain.shape == (2, 17)
    assert surely_equal(model, plain, model.generate(ids, **options))
    for cache in ("dynamic", "static", "hybrid"):
        made = model.generate(ids, cache_implementation=cache, **options)
        assert surely_equal(model, plain, made), cache


def surely_equal(model: Any, one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether tokens are equal up to one that another rounding may choose."""
    for first, second in zip(one, two, strict=True):
        differ = (first != second).nonzero()
        if len(differ):
            scores = tiny.logits(model, first[None, : int(differ[0])])[0, -1]
            gap = (scores[first[differ[0]]] - scores[second[differ[0]]]).abs()
            if gap > 2**-8 * scores.abs().max():  # an ulp of bf16
                return False
    return True


def test_beams_are_searched(model: Any) -> None:
    ids = tiny.tokens(length=9)
    made = model.generate(ids, num_beams=3, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert made.shape == (2, 13)


def test_padding_changes_nothing_but_rounding(folder: Path) -> None:
    found = Reference.of(folder)
    model = ktk.transformers.load(folder, dtype=torch.float32)
    exact = tiny.float32(folder)
    ids = torch.cat([torch.zeros(2, 5, dtype=torch.long), found.ids], 1)
    mask = (ids != 0).long()
    places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(0)}
    with tiny.recorded(exact) as calls:
        padded = tiny.logits(exact, ids, **places)
    with tiny.routed_as(model, calls):
        error = (tiny.logits(model, ids, **places) - padded)[:, 5:]
    assert error.norm() <= (found.eager - found.logits).norm()


@pytest.mark.parametrize("where", ["auto", "cpu", {"": "cpu"}])
def test_device_maps(folder: Path, wanted: torch.Tensor, where: Any) -> None:
    pytest.importorskip("accelerate")
    model = tiny.load(folder, experts_implementation="ktk", device_map=where)
    assert torch.equal(tiny.logits(model, tiny.tokens()), wanted)


def test_layers_on_disk_and_hooks_of_accelerate(
    folder: Path, wanted: torch.Tensor, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate")
    names = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    places = {**dict.fromkeys(names, "cpu"), "model.layers.1": "disk"}
    options = {"device_map": places, "offload_folder": str(tmp_path)}
    model = tiny.load(folder, experts_implementation="ktk", **options)
    assert torch.equal(tiny.logits(model, tiny.tokens()), wanted)
    # Files that ktk cannot pack from: transformers loads all, and that layer stays on the disk.
    odd = tmp_path / "odd"
    shutil.copytree(folder, odd)
    save_file({"nobody's": torch.zeros(1)}, odd / "more.safetensors")
    model = tiny.load(odd, experts_implementation="ktk", **options)
    assert [packed_of(layer.mlp.experts) is False for layer in model.model.layers] == [False, True]
    error = tiny.logits(model, tiny.tokens()) - wanted
    found = Reference.of(folder)
    assert error.norm() <= 2 * (found.eager - found.logits).norm()
    model = tiny.load(folder, experts_implementation="ktk")
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(tiny.logits(model, tiny.tokens()), wanted)


def test_checkpoints_of_activations(model: Any, wanted: torch.Tensor) -> None:
    model.activation_checkpointing_enable()
    model.train()
    assert torch.equal(tiny.logits(model, tiny.tokens()), wanted)
    assert model(tiny.tokens()).logits.requires_grad


def test_adapters_on_attention(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    ids = tiny.tokens()
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    ours, stock = (
        peft.get_peft_model(tiny.load(folder, experts_implementation=name), lora)
        for name in ("ktk", "eager")
    )
    torch.manual_seed(0)
    with torch.no_grad():
        for name, one in ours.named_parameters():
            if "lora_" in name:
                one.normal_(std=0.1)
                stock.get_parameter(name).copy_(one)
    with tiny.recorded(stock) as calls:
        wanted = tiny.logits(stock, ids)
    plain = tiny.load(folder, experts_implementation="eager")
    with tiny.routed_as(ours, calls), tiny.routed_as(plain, calls):
        moved = (wanted - tiny.logits(plain, ids)).norm()
        assert (tiny.logits(ours, ids) - wanted).norm() < moved / 4  # both round to bf16
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(
        tiny.load(folder, experts_implementation="ktk"), tmp_path
    )
    assert torch.equal(tiny.logits(again, ids), tiny.logits(ours, ids))


def test_a_model_that_is_packed_already(model: Any) -> None:
    with pytest.raises(ValueError, match="packed already, for BF16"):
        ktk.transformers.pack(model, "AMXINT8")
