"""`ktk inspect --escapes` counts what BF16Z cannot keep in 12 bits, as numpy counts it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ktk
from ktk.cli import app

E, H, I = 2, 96, 160  # noqa: E741 - the names of the table of families
PARTS = {"gate": (I, H), "up": (I, H), "down": (H, I)}


def planted(shape: tuple[int, int], escapes: list[int], seed: int) -> torch.Tensor:
    """16 frequent exponents in each block of 32 rows, and so many weights with other ones."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 128, shape, np.uint16) | rng.integers(100, 116, shape, np.uint16) << 7
    for block, count in enumerate(escapes):
        rows = bits[32 * block : 32 * block + 32]
        # Others than the frequent ones, and each of them rarer than any of those.
        others = np.resize(np.r_[0:100, 116:255], count).astype(np.uint16) << 7
        rows.reshape(-1)[rng.choice(rows.size, count, replace=False)] = others
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def slow_count(weight: torch.Tensor) -> int:
    """Count escapes one exponent at a time."""
    bits = weight.view(torch.int16).numpy().view(np.uint16)
    found = 0
    for n in range(0, len(bits), 32):
        counts = Counter((bits[n : n + 32].reshape(-1) >> 7 & 255).tolist())
        found += sum(count for _, count in counts.most_common()[16:])
    return found


def write(folder: Path, made: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(made, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "num_experts": E,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "moe_intermediate_size": I,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def name(layer: int, expert: int, part: str) -> str:
    return f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["inspect", "--escapes", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.stdout


def escapes_of(path: Path) -> Any:
    return json.loads(invoke(str(path), "--json"))["escapes"]


# A block of [160, 96] has 3 steps, room for 16 patches; one of [96, 160] has 5, room for 32.
COUNTS = {"gate": [16, 0, 3, 0, 0], "up": [0, 17, 0, 0, 40], "down": [32, 1, 0]}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    """One layer as planted, and one without escapes."""
    return {
        name(layer, expert, part): planted(
            shape, [] if layer else COUNTS[part], 10 * layer + expert
        )
        for layer in (0, 1)
        for expert in range(E)
        for part, shape in PARTS.items()
    }


def test_planted_escapes_are_counted(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    found = escapes_of(write(tmp_path, tensors))
    first, second = found["layers"]
    expected = E * sum(map(sum, COUNTS.values()))
    counted = sum(slow_count(t) for key, t in tensors.items() if ".layers.0." in key)
    assert first["escapes"] == expected == counted
    assert (first["number"], first["weights"]) == (0, E * 3 * H * I)
    assert first["share"] == pytest.approx(expected / (E * 3 * H * I))
    assert (first["overflowing"], first["blocks"]) == (E * 2, E * 13)
    assert (first["plain"], first["matrices"]) == (E, E * 3)
    assert (second["escapes"], second["overflowing"], second["plain"]) == (0, 0, 0)
    moe = [ktk.MoE.from_checkpoint(tmp_path, layer, "BF16Z", shards=1) for layer in (0, 1)]
    assert [first["nbytes"], second["nbytes"]] == [one.nbytes for one in moe]
    total = found["total"]
    for key in ("weights", "escapes", "blocks", "overflowing", "matrices", "plain", "nbytes"):
        assert total[key] == first[key] + second[key]
    assert total["bits_per_weight"] == pytest.approx(8 * total["nbytes"] / total["weights"])
    assert found["reason"] is None


@pytest.mark.parametrize("scale", [0.02, 1e-38])
def test_gaussian_weights_have_what_numpy_counts(scale: float, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    made = {
        name(0, expert, part): (torch.randn(shape, generator=generator) * scale).bfloat16()
        for expert in range(E)
        for part, shape in PARTS.items()
    }
    [found] = escapes_of(write(tmp_path, made))["layers"]
    assert found["escapes"] == sum(map(slow_count, made.values()))


def test_the_table_has_layers_and_their_sum(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    text = " ".join(invoke(str(write(tmp_path, tensors))).split())
    counted = E * sum(map(sum, COUNTS.values()))
    share = f"{100 * counted / (E * 3 * H * I):.3g}"
    assert f"0 {counted} ({share} %) 4 of 26 2 of 6" in text
    assert "1 0 (0 %) 0 of 26 0 of 6" in text
    assert f"all {counted} (" in text
    assert "Headers only" not in text


def test_weights_that_are_not_bf16_have_a_sentence(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    wide = {key: weight.float() for key, weight in tensors.items()}
    sentence = "stored as F32: escapes are counted of bf16 weights"
    alone = write(tmp_path / "wide", wide)
    assert f"The experts are {sentence}" in " ".join(invoke(str(alone)).split())
    found = escapes_of(alone)
    assert found["layers"] == []
    assert sentence in found["reason"]
    mixed = {key: wide[key] if ".layers.1." in key else one for key, one in tensors.items()}
    found = escapes_of(write(tmp_path / "mixed", mixed))
    assert [layer["number"] for layer in found["layers"]] == [0]
    assert f"Other layers are {sentence}" in found["reason"]
