"""docs/training.md has the memory that `ktk inspect --training` tells."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import platform
from pathlib import Path
from types import ModuleType

import pytest
from blocks import ROOT
from typer.testing import CliRunner

from ktk.cli import app

TOOL = ROOT / "tools/training_table.py"
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="only x86-64 has all the backends that the page lists"
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_table", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_current(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    assert tool.written(page) == page, "python tools/training_table.py"


def test_other_sizes_make_another_page(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tool.PAGE.read_text()
    monkeypatch.setitem(tool.MODELS, "Kimi-K2", (60, 384, 8, 7168, 2176))
    assert tool.written(page) != page


def test_a_missing_place_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match="has no place for the table"):
        tool.written("")


def test_the_command_says_the_same(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files with one layer of a published model."""
    sizes = tool.MODELS["Qwen3-30B-A3B"][1:]
    monkeypatch.setitem(tool.MODELS, "one layer", (1, *sizes))
    _write_headers(tmp_path, *sizes)
    arguments = ["inspect", str(tmp_path), "--training", "--rank", "8", "--json"]
    found = json.loads(CliRunner().invoke(app, arguments).output)
    for name in tool.BACKENDS:
        memory = tool.memory("one layer", name, 8)
        assert memory.experts == found["backends"][name]["nbytes"]
        of_default = dataclasses.replace(memory, experts=found["training"]["experts"])
        assert dataclasses.asdict(of_default) == found["training"]


def _write_headers(folder: Path, experts: int, top_k: int, hidden: int, intermediate: int) -> None:
    """Write a checkpoint whose weights are a hole in the file, which takes no room."""
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 1,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
        "hidden_act": "silu",
    }
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for expert in range(experts):
        for part in ("gate", "up", "down"):
            shape = (hidden, intermediate) if part == "down" else (intermediate, hidden)
            begin, end = end, end + 2 * math.prod(shape)
            name = f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    data = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(data).to_bytes(8, "little") + data)
        file.truncate(8 + len(data) + end)
