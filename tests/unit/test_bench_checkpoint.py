"""ktk bench --checkpoint: layers of a model that is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ktk.bench import model
from ktk.cli import app
from ktk.errors import CheckpointError

from .test_bench import QUICK


def write_model(folder: Path, layers: int) -> Path:
    config = {
        "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": layers, "hidden_size": 96, "moe_intermediate_size": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"gate": (64, 96), "up": (64, 96), "down": (96, 64)}
    save_file(
        {
            f"model.layers.{n}.mlp.experts.{e}.{part}_proj.weight": torch.randn(shape).bfloat16()
            for n in range(layers)
            for e in range(4)
            for part, shape in shapes.items()
        },
        folder / "model.safetensors",
    )
    return folder


@pytest.mark.slow
def test_layers_of_a_checkpoint_are_timed(tmp_path: Path) -> None:
    path = write_model(tmp_path, 3)

    def lines(*arguments: str) -> list[dict[str, Any]]:
        asked = [*QUICK, "--checkpoint", str(path), "--tokens", "1,4", "--json", *arguments]
        done = CliRunner().invoke(app, asked, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return [json.loads(line) for line in done.stdout.splitlines()]

    found = lines("--layer", "1")
    assert [(one["backend"], one["tokens"], one["layers"]) for one in found] == [
        ("BF16", 1, 1), ("BF16", 4, 1),
    ]  # fmt: skip
    layer_bytes = 4 * 3 * 96 * 64 * 2
    for one in found:
        assert one["shape"] == tmp_path.name
        assert one["model_layers"] == 3
        assert one["rotated_gb"] * 1e9 >= layer_bytes
        expected = one["tokens"] / (3 * one["seconds"])
        assert one["experts_tokens_per_s"] == pytest.approx(expected)
        assert one["experts_hit"] <= 4
    all_layers = lines("--rotate", "1", "--backend", "AMXINT8", "--backend", "bf16")
    assert {(one["backend"], one["layers"]) for one in all_layers} == {("AMXINT8", 3), ("BF16", 3)}


def test_a_layer_without_experts_is_named(tmp_path: Path) -> None:
    arguments = [*QUICK, "--checkpoint", str(write_model(tmp_path, 2)), "--layer", "7"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert isinstance(done.exception, CheckpointError)
    assert "layer 7" in str(done.exception)


def test_a_layer_that_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "available_memory", lambda: 100_000)
    done = CliRunner().invoke(app, [*QUICK, "--checkpoint", str(write_model(tmp_path, 1))])
    assert isinstance(done.exception, MemoryError)
    assert "layer 0 of" in str(done.exception)
    assert "more than 60 % of the free memory" in str(done.exception)
