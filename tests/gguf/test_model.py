"""GGUF files without a backend's name, as whole models, and as `ktk inspect` sees them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from typer.testing import CliRunner

import ktk
from ktk.checkpoint import open_checkpoint
from ktk.cli import app
from ktk.loading import default_backend

#: Types of gate, up and down; and the backend that takes them as they are.
CASES = {
    ("Q4_K", "Q4_K", "Q6_K"): "LLAMAFILE",
    ("Q8_0", "Q8_0", "Q8_0"): "LLAMAFILE",
    ("Q4_K", "Q5_K", "F16"): "LLAMAFILE",
    ("BF16", "BF16", "BF16"): "BF16",
    ("F16", "F16", "F16"): "BF16",
    ("F32", "F32", "F32"): "BF16",
    # Gate and up want activations of other kinds.
    ("Q8_0", "F32", "Q8_0"): "LLAMAFILE",
}


@pytest.mark.parametrize("types", CASES, ids=" ".join)
def test_the_types_decide(tmp_path: Path, types: tuple[str, str, str]) -> None:
    path = files.write(tmp_path / "model.gguf", files.stacked(files.experts(*types)))
    with open_checkpoint(path) as checkpoint:
        assert default_backend(checkpoint.layer(0)).name == CASES[types]


def test_blocks_are_loaded_as_they_are_without_a_name(tmp_path: Path) -> None:
    parts = files.experts("Q4_0", down="Q8_0")
    moe = ktk.MoE.from_checkpoint(files.write(tmp_path / "m.gguf", files.stacked(parts)), 0)
    assert moe.backend.name == "LLAMAFILE"
    for e in range(files.E):
        for part, got in zip(files.PARTS, moe.unpack_expert(e), strict=True):
            assert np.array_equal(np.asarray(got), parts[part][e].values.astype(np.float32))


@pytest.mark.parametrize(("kind", "backend"), [("Q8_0", "LLAMAFILE"), ("F16", "BF16")])
def test_a_factor_beside_is_kept_beside_blocks_only(
    tmp_path: Path, kind: str, backend: str
) -> None:
    tensors = files.stacked(files.experts(kind))
    for part in files.PARTS:
        factor = files.Tensor(np.full(files.E, 0.5, np.float32), Type.F32)
        tensors[f"blk.0.ffn_{part}_exps.scale"] = factor
    path = files.write(tmp_path / "model.gguf", tensors)
    assert ktk.MoE.from_checkpoint(path, 0).backend.name == backend


def model(folder: Path) -> Path:
    """Write four layers of two sets of types, the last of which predicts further tokens."""
    tensors: dict[str, Any] = {"blk.0.ffn_gate.weight": files.tensor((3, files.H), "F32", 9)}
    for layer, down in {1: "Q8_0", 2: "Q4_0", 3: "Q8_0"}.items():
        tensors |= files.stacked(files.experts("Q4_0", down=down), layer)
    fields = {**files.FIELDS, "block_count": 4, "nextn_predict_layers": 1}
    return files.write(folder / "model.gguf", tensors, fields=fields, shard_tensors=4)


def test_a_model_is_loaded_layer_by_layer(tmp_path: Path) -> None:
    path = model(tmp_path)
    assert path.name.endswith("-of-00003.gguf")
    loaded = ktk.Model.from_checkpoint(path)
    assert loaded.layers == (1, 2)
    for number, moe in loaded.items():
        alone = ktk.MoE.from_checkpoint(path, number)
        for e in range(files.E):
            for got, wanted in zip(moe.unpack_expert(e), alone.unpack_expert(e), strict=True):
                assert np.array_equal(np.asarray(got), np.asarray(wanted))
    assert ktk.Model.from_checkpoint(path, layers=[3]).layers == (3,)


def test_inspect_says_what_loading_takes(tmp_path: Path) -> None:
    path = model(tmp_path)
    result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert [layer["stored"] for layer in document["layers"]] == ["Q4_0, Q8_0", "Q4_0", "Q4_0, Q8_0"]
    for name in ("LLAMAFILE", "BF16", "AMXINT8"):
        loaded = ktk.Model.from_checkpoint(path, name, layers=[1, 2, 3])
        assert document["backends"][name]["nbytes"] == loaded.nbytes, name
