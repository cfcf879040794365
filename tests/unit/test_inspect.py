"""`ktk inspect` says what loading would find, to the byte."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import ktk
from ktk.cli import app, contents
from ktk.errors import BackendImportError, BackendUnsupported
from ktk.sizes import size_text

E, K, H, I = 3, 2, 160, 96  # noqa: E741 - the names the table of families uses
LAYERS = (1, 2, 4)


def write(folder: Path, made: dict[str, torch.Tensor]) -> Path:
    save_file(made, folder / "model.safetensors")
    config = {
        "model_type": "qwen3_moe",
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "moe_intermediate_size": I,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {
        f"model.layers.{n}.mlp.experts.{e}.{part}_proj.weight": torch.randn(shape).bfloat16()
        for n in LAYERS
        for e in range(E)
        for part, shape in shapes.items()
    }


def invoke(*arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["inspect", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def unusable(name: str) -> str:
    """Return why a backend cannot run on this machine; empty if it can."""
    try:
        ktk.load_backend(name)
    except BackendUnsupported as error:
        return error.brief
    return ""


def test_figures_are_those_of_loaded_layers(tmp_path: Path) -> None:
    document = json.loads(invoke(str(write(tmp_path, tensors())), "--json"))
    assert [layer["number"] for layer in document["layers"]] == list(LAYERS)
    for layer in document["layers"]:
        assert layer["family"] == "per-expert"
        assert layer["stored"] == "BF16"
        assert layer["default_backend"] == "BF16"
        assert layer["nbytes"] == E * 3 * H * I * 2
        sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")
        assert tuple(layer[name] for name in sizes) == (E, K, H, I)
        assert layer["error"] is None
    assert document["nbytes"] == len(LAYERS) * E * 3 * H * I * 2
    assert document["backends"].keys() == ktk.backends().keys()
    taking = 0
    for name, use in document["backends"].items():
        if use["nbytes"] is None:
            assert use["reason"] == unusable(name)
            continue
        taking += 1
        model = ktk.Model.from_checkpoint(tmp_path, name)
        assert use["nbytes"] == model.nbytes, name
        assert use["stored"] == str(model[1].format), name
        assert use["how"] == {
            "BF16": "stored as they are",
            "BF16Z": "stored as they are",
            "LLAMAFILE": "stored as they are",
            "FP8": "decoded to f32 and quantised by ktk.quantize",
            "MXFP4": "decoded to f32 and quantised by ktk.quantize",
            "RAWINT4": "decoded to f32 and quantised by ktk.quantize",
        }.get(name, f"quantised by {name}")
    assert taking >= 3


def test_every_variant_packs_to_the_size_that_the_core_announces() -> None:
    weight = torch.randn(H, I)
    for name in ktk.backends():
        if unusable(name):
            continue
        backend = ktk.load_backend(name)
        if ktk.Format("f32") not in backend.accepts:
            continue
        stored = backend.core.stored_as(ktk.Format("f32"), H, I)
        for variant in backend.variants:
            if variant.runnable:
                packed = ktk._core.PackedMatrix(backend.core, variant.name, weight.numpy())
                assert backend.core.packed_size(stored, H, I, variant.name) == packed.nbytes
        with pytest.raises(ValueError, match=f"^{name} stores no weights as i8"):
            backend.core.packed_size(ktk.Format("i8", "f32", "u8", 7, 7), H, I)


def test_alike_layers_share_a_row(tmp_path: Path) -> None:
    text = invoke(str(write(tmp_path, tensors())))
    assert "1-2, 4" in text
    assert f"{E} of {H} x {I}, {K} per token, silu" in text
    assert "BF16 (default)" in text


def test_a_damaged_layer_is_a_row_and_a_status(tmp_path: Path) -> None:
    made = tensors()
    missing = "model.layers.2.mlp.experts.1.down_proj.weight"
    del made[missing]
    write(tmp_path, made)
    document = json.loads(invoke(str(tmp_path), "--json", status=1))
    errors = {layer["number"]: layer["error"] for layer in document["layers"]}
    assert errors[1] is errors[4] is None
    assert f"no tensor {missing}" in errors[2]
    assert missing in "".join(invoke(str(tmp_path), status=1).split("\n"))


def test_memory_that_is_not_there_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "available_memory", lambda: 200_000)
    text = invoke(str(write(tmp_path, tensors())))
    assert "free memory: 195.3 KiB" in text
    assert "does not fit" in text


def test_a_broken_backend_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise BackendImportError(f"{name} [is] broken")

    monkeypatch.setattr(contents, "load_backend", broken)
    text = invoke(str(write(tmp_path, tensors())))
    assert "AMXINT8 [is] broken" in text, "brackets of a message are not markup"


def test_totals_keep_the_reason_of_any_layer() -> None:
    layers = [
        contents.LayerReport(0, backends={"A": contents.Use(5, "x"), "B": contents.Use(7, "y")}),
        contents.LayerReport(1, error="damaged"),
        contents.LayerReport(
            2, backends={"A": contents.Use(5, "z"), "B": contents.Use(reason="-")}
        ),
    ]
    assert contents.totals(layers) == {
        "A": contents.Use(10, "x; z", how=""),
        "B": contents.Use(reason="-"),
    }


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0.0 KiB"), (1536, "1.5 KiB"), (3 << 20, "3.0 MiB"), (5 << 29, "2.5 GiB")],
)
def test_sizes_are_written_for_people(nbytes: int, text: str) -> None:
    assert size_text(nbytes) == text


def test_a_narrow_terminal_tears_no_word(tmp_path: Path) -> None:
    folder = str(write(tmp_path, tensors()))

    def words(columns: int) -> set[str]:
        env = {"COLUMNS": str(columns)}
        text = CliRunner().invoke(app, ["inspect", folder], env=env).output
        assert max(map(len, text.splitlines())) <= columns
        return {word.strip(";,:") for word in text.split()}

    torn = words(40) - words(400)
    # The folder's name is as long as it is, and free memory another one each time.
    assert not [word for word in torn if word not in folder and not re.match(r"[\d─]", word)]


def test_backends_that_cannot_be_used_come_last() -> None:
    uses = {"A": contents.Use(reason="-"), "B": contents.Use(5, "x"), "C": contents.Use(7, "y")}
    table = contents._backend_table([contents.LayerReport(0, backends=uses)])
    assert list(table.columns[0].cells) == ["B", "C", "A"]


def test_training_says_what_memory_it_takes(tmp_path: Path) -> None:
    folder = str(write(tmp_path, tensors()))
    memory = json.loads(invoke(folder, "--training", "--rank", "4", "--json"))["training"]
    factors = len(LAYERS) * 3 * E * 4 * (H + I)
    assert memory["rank"] == 4
    assert memory["factors"] == 4 * factors
    assert memory["optimizer"] == 12 * factors
    assert memory["products_per_token"] == len(LAYERS) * K * 2 * (I * 2 + 4 * 4)
    assert memory["hidden_per_token"] == len(LAYERS) * H * 2
    backends = json.loads(invoke(folder, "--json"))
    assert "training" not in backends
    assert memory["experts"] == backends["backends"]["BF16"]["nbytes"]
    assert "adapter of rank 4" in invoke(folder, "--training", "--rank", "4")
