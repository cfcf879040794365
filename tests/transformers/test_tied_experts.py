"""Experts of two modules that have the same weights, as of DiffusionGemma, are packed once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import FAMILIES

import ktk.transformers
from ktk.transformers.packed import packed_modules
from ktk.transformers.ties import tied_experts

ENCODER, DECODER = "model.encoder.language_model.layers.", "model.decoder.layers."


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = FAMILIES["diffusion-gemma"].make(64, 32)
    with torch.no_grad():
        for one in model.parameters():
            one.normal_(std=0.1)
    model.bfloat16().save_pretrained(path)
    return path


def load(folder: Path, implementation: str) -> Any:
    kind = transformers.DiffusionGemmaForBlockDiffusion
    return kind.from_pretrained(folder, experts_implementation=implementation)


@pytest.fixture(params=["from files", "in memory"])
def model(request: pytest.FixtureRequest, folder: Path) -> Any:
    if request.param == "from files":
        return load(folder, "ktk")
    return ktk.transformers.pack(load(folder, "eager"))


@pytest.mark.parametrize("how", ["from files", "in memory"])
def test_files_with_other_weights_for_each_are_not_tied(
    folder: Path, tmp_path: Path, how: str
) -> None:
    """As of a model whose adapters were merged: transformers does not tie what differs."""
    state = stored(folder)
    for name in [name for name in state if name.startswith(DECODER) and ".experts." in name]:
        state[name.replace(DECODER, ENCODER)] = state[name] * 2
    shutil.copy(folder / "config.json", tmp_path)
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load(tmp_path, "ktk" if how == "from files" else "eager")
    if how == "in memory":
        ktk.transformers.pack(model)
    packed = packed_modules(model)
    assert len(set(packed.values())) == 6
    for name, one in packed.items():
        for tensor, value in one.unpacked().items():
            assert torch.equal(value, state[f"{name}.{tensor}"]), name


def test_both_modules_call_what_is_packed_once(model: Any) -> None:
    packed = packed_modules(model)
    assert len(packed) == 6
    for layer in range(3):
        encoder, decoder = (packed[f"{one}{layer}.experts"] for one in (ENCODER, DECODER))
        assert encoder is decoder
    assert len(set(packed.values())) == 3
    assert not any(name.endswith(".down_proj") for name, _ in model.named_parameters())
    assert not tied_experts(model)


def test_all_else_is_tied_as_it_was(folder: Path, model: Any) -> None:
    stock = load(folder, "eager").state_dict()
    mine = model.state_dict()
    gone = {name for name in stock if ".experts." in name}
    assert len(gone) == 12
    assert mine.keys() == stock.keys() - gone
    assert all(torch.equal(one, stock[name]) for name, one in mine.items())
    head = model.get_parameter("lm_head.weight")
    assert head is model.get_parameter("model.decoder.embed_tokens.weight")


def test_files_have_each_weight_once(folder: Path, model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)
    source, again = stored(folder), stored(tmp_path)
    assert again.keys() == source.keys()
    assert all(torch.equal(again[name], one) for name, one in source.items())
