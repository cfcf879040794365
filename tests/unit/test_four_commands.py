"""The four commands of README, on a folder that transformers wrote: inspect, convert, load, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ktk
from ktk.cli import app

transformers = pytest.importorskip("transformers")

LAYER, TOKENS = 1, 17
# Relative error of AMXINT8 in README.
PROMISED = 0.028


def test_a_folder_is_inspected_converted_loaded_and_run(tmp_path: Path) -> None:
    source, packed = tmp_path / "source", tmp_path / "packed"
    torch.manual_seed(5)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=128,
        moe_intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=8,
        num_experts_per_tok=3,
        initializer_range=0.1,
    )
    model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    model.save_pretrained(source)

    document = json.loads(run("inspect", str(source), "--json"))
    assert [layer["number"] for layer in document["layers"]] == [0, 1]
    assert document["backends"]["AMXINT8"]["nbytes"] < document["nbytes"]
    run("convert", str(source), str(packed), "--backend", "AMXINT8")
    loaded = ktk.Model.from_checkpoint(packed)
    assert {moe.backend.name for moe in loaded.values()} == {"AMXINT8"}
    assert loaded.nbytes == document["backends"]["AMXINT8"]["nbytes"]

    model.set_experts_implementation("eager")
    experts = model.double().model.layers[LAYER].mlp.experts
    hidden = torch.randn(TOKENS, 128)
    weights, ids = torch.rand(TOKENS, 8).topk(3)
    with torch.no_grad():
        expected = experts(hidden.double(), ids, weights.double())
    got = loaded[LAYER](hidden, ids, weights).double()
    assert torch.linalg.norm(got - expected) <= PROMISED * torch.linalg.norm(expected)

    again = json.loads(run("inspect", str(packed), "--json"))
    assert {layer["default_backend"] for layer in again["layers"]} == {"AMXINT8"}
    assert again["backends"]["AMXINT8"]["nbytes"] == loaded.nbytes
    assert again["backends"]["BF16"]["how"] == "decoded to f32 and rounded"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout
