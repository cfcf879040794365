"""Whatever `ktk convert` can decode, loading takes as well, and makes the same weights of it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import checkpoints as made
import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import BLOCKS, GROUPS, MX, ROWS, outputs, same_weights

import ktk
from ktk import Format
from ktk.checkpoint import open_checkpoint
from ktk.conversion import convert
from ktk.errors import BackendUnsupported, CheckpointError
from ktk.loading import load
from ktk.loading.plan import plan_layer

BACKENDS = ("BF16", "AMXINT4", "AMXINT8", "FP8", "MXFP4", "RAWINT4", "LLAMAFILE", "BLIS", "KML")
SOURCES: dict[str, Format | None] = {
    "bf16": None,
    "fp8": BLOCKS,
    "int8": ROWS,
    "int4": GROUPS,
    "mxfp4": MX,
}


def usable(name: str) -> str:
    if not ktk.backends()[name].built:
        pytest.skip(f"{name} is not built here")
    try:
        ktk.load_backend(name)
    except BackendUnsupported as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sources")
    found = {name: made.write(folder / name, fmt) for name, fmt in SOURCES.items()}
    for kind in ("Q8_0", "F16"):
        parts = gguf_files.experts(kind, down="Q4_0", bias=True)
        found[kind] = gguf_files.write(folder / f"{kind}.gguf", gguf_files.stacked(parts))
    convert(found["bf16"], folder / "packed", backend="AMXINT4")
    return {**found, "packed": folder / "packed"}


@pytest.mark.parametrize("source", [*SOURCES, "Q8_0", "F16", "packed"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_loading_makes_what_converting_and_loading_makes(
    backend: str, source: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    usable(backend)
    path = sources[source]
    [plan] = convert(path, tmp_path / "packed", backend=backend)
    converted = ktk.MoE.from_checkpoint(tmp_path / "packed", 0, shards=1)
    direct = ktk.MoE.from_checkpoint(path, 0, backend, shards=1)
    assert converted.backend.name == direct.backend.name == backend
    assert (direct.format, direct.down_format) == (converted.format, converted.down_format)
    assert same_weights(direct, converted)
    assert torch.equal(outputs(direct), outputs(converted))
    with open_checkpoint(path) as checkpoint:
        route = plan_layer(checkpoint, 0, cast("ktk.Backend", direct.backend), None, None, {}).route
    assert route.how == plan.encoder.how


@pytest.mark.parametrize("backend", ["AMXINT8", "FP8"])
def test_the_wrapper_and_whole_models_obey_the_same_rule(
    backend: str, sources: dict[str, Path]
) -> None:
    direct = ktk.MoE.from_checkpoint(sources["mxfp4"], 0, backend)
    sizes = (made.E, made.K, made.H, made.I)
    wrapper = ktk.KTMoEWrapper(0, *sizes, weight_path=sources["mxfp4"], method=backend)
    wrapper.load_weights()
    assert wrapper.moe is not None
    assert same_weights(wrapper.moe, direct)
    model = ktk.Model.from_checkpoint(sources["mxfp4"], backend, progress=False)
    assert same_weights(model[0], direct)


def test_groups_that_are_asked_for_are_made_of_codes(sources: dict[str, Path]) -> None:
    wanted = Format("e4m3", "ue8m0", "none", 1, 32)
    moe = ktk.MoE.from_checkpoint(sources["int4"], 0, "FP8", weight_format=wanted)
    assert moe.format == wanted
    with open_checkpoint(sources["int4"]) as checkpoint:
        values = checkpoint.layer(0).values(1, torch.float32).arrays()
    for part, found in zip(made.PARTS, moe.unpack_expert(1), strict=True):
        meant = ktk.quantize.quantize(values[part], wanted).dequantize()
        assert np.array_equal(np.asarray(found), meant.numpy())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FP8", BLOCKS),
        ("FP8_PERCHANNEL", Format("e4m3", "f32", "none", 1, 0)),
        ("mxfp8", Format("e4m3", "ue8m0", "none", 1, 32)),
    ],
)
def test_a_name_that_stands_for_a_format_is_obeyed(
    name: str, expected: Format, sources: dict[str, Path], tmp_path: Path
) -> None:
    convert(sources["bf16"], tmp_path / "packed", backend=name)
    converted = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE.from_checkpoint(sources["bf16"], 0, name)
    assert direct.format == converted.format == expected
    assert same_weights(direct, converted)
    model = ktk.Model.from_checkpoint(sources["bf16"], name, progress=False)
    assert same_weights(model[0], direct)
    # What is stored in another format of the backend is kept all the same.
    assert ktk.MoE.from_checkpoint(sources["fp8"], 0, name).format == BLOCKS


def test_codes_that_become_others_are_a_warning_once(
    sources: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_said", set())
    with caplog.at_level(logging.INFO, logger="ktk"):
        for _ in range(2):
            ktk.MoE.from_checkpoint(sources["fp8"], 0, "AMXINT8")
    told = [record for record in caplog.records if "quantised" in record.message]
    assert [record.levelno for record in told] == [logging.WARNING, logging.INFO]
    line = "layers 0: decoded to f32 and quantised by AMXINT8; i8 with f32 scales per 1 x k"
    origin = "(from e4m3 with f32 scales per 128 x 128)"
    assert told[0].message == f"{sources['fp8']}, {line} {origin}"
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="ktk"):
        ktk.MoE.from_checkpoint(sources["bf16"], 0, "AMXINT8")
        ktk.MoE.from_checkpoint(sources["fp8"], 0)
        ktk.MoE.from_checkpoint(sources["fp8"], 0, "BF16")
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert "layers 0: quantised by AMXINT8" in caplog.text
    assert "layers 0: stored as they are; e4m3" in caplog.text
    assert "layers 0: decoded to f32 and rounded; bf16" in caplog.text


def test_layers_alike_share_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "_said", set())
    path = made.write(tmp_path, MX, layers=(0, 1, 2))
    with caplog.at_level(logging.WARNING, logger="ktk"):
        ktk.Model.from_checkpoint(path, "AMXINT4", progress=False)
    [record] = caplog.records
    assert "layers 0-2: decoded to f32 and quantised by AMXINT4" in record.message


def test_a_weight_that_cannot_be_quantized_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = made.write(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.mlp.experts.2.up_proj.weight"][3, 4] = torch.nan
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layer 0: up of expert 2: .* not finite"):
        ktk.MoE.from_checkpoint(path, 0, "FP8")
    with pytest.raises(CheckpointError, match=r"layer 0: up of expert 2: .* not finite"):
        convert(path, tmp_path / "packed", backend="FP8")


def test_requantizing_holds_few_experts(tmp_path: Path) -> None:
    """Memory of the process: the packed layer is 25 MB, the floats between 101."""
    path = made.write(tmp_path, BLOCKS, sizes=(32, 256, 1024))
    with open_checkpoint(path) as checkpoint:
        plan = plan_layer(checkpoint, 0, ktk.load_backend("AMXINT8"), None, None, {})
        assert "decoded" in plan.route.how
        begin, seen = own_memory(), []
        moe = load.load_layers(checkpoint, [plan], lambda _: seen.append(own_memory()))[0]
    floats = 3 * 256 * 1024 * 4  # of one expert
    # One is packed while the next is read, each in some steps, and malloc keeps some of that; the
    # number of experts does not matter: all of them would be twice as much.
    most = max(seen) - begin - moe.nbytes
    assert most < 16 * floats, f"{most / 1e6:.0f} MB"


def own_memory() -> int:
    """Bytes of this process, mapped files left out."""
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024
