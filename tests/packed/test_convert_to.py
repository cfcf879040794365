"""`ktk convert --to` writes what compressed-tensors itself reads, and what ktk reads."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import checkpoints as made
import models
import pytest
import torch
from typer.testing import CliRunner

import ktk
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.cli import app
from ktk.conversion.compressed import TARGETS, convert_checkpoint
from ktk.expert import Matrix
from ktk.quantize import dequantize, quantize

runner = CliRunner()
# Others than the usual ones: rows that end in a group of their own, and groups of 64.
SIZES = [(made.E, made.H, made.I), (2, 96, 160), (2, 192, 64)]
BACKENDS = {"int4": "RAWINT4", "fp8": "FP8", "nvfp4": "MXFP4", "mxfp4": "MXFP4"}


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("to", TARGETS)
def test_compressed_tensors_reads_the_same_values(
    to: str, sizes: made.Sizes, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source, output = models.write(tmp_path / "source", sizes), tmp_path / to
    convert_checkpoint(source, output, to=to)
    entries = json.loads((output / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(entries)
    [scheme] = config.config_groups.values()
    compressor = BaseCompressor.get_value_from_registry(config.format)
    tensors = models.tensors(output)
    with SafetensorsCheckpoint(output) as checkpoint:
        assert checkpoint.layers() == [0, 1]
        for number in checkpoint.layers():
            layer = checkpoint.layer(number)
            for expert in range(sizes[0]):
                for part, matrix in layer.values(expert).matrices.items():
                    stem = f"model.layers.{number}.mlp.experts.{expert}.{part}_proj."
                    state = {
                        name.removeprefix(stem): tensors[name]
                        for name in tensors
                        if name.startswith(stem)
                    }
                    assert set(state) == set(compressor.compression_param_names(scheme))
                    found = compressor.decompress(state, scheme)["weight"]
                    # Products of codes and scales of int4 are rounded to the scales' dtype.
                    assert torch.equal(found, matrix.data.to(found.dtype))
                    # And made of these values, all bytes are the same.
                    exact = {**state, "weight": matrix.data.float()}
                    if to == "mxfp4":
                        exact["weight_scale"] = torch.exp2(state["weight_scale"].float() - 127)
                    if to == "nvfp4":
                        exact["weight_scale"] = state["weight_scale"].float()
                    exact.pop("weight_packed", None)
                    again = compressor.compress(exact, scheme)
                    for role, tensor in state.items():
                        assert torch.equal(
                            *(_bytes(one, role, to) for one in (again[role], tensor))
                        )


def _bytes(tensor: torch.Tensor, role: str, to: str) -> torch.Tensor:
    """Return bytes; those of e2m1 without the sign of zeros, which the library drops."""
    if role != "weight_packed" or to == "int4":
        return tensor.contiguous().reshape(-1).view(torch.uint8)
    low, high = tensor & 15, tensor >> 4
    return torch.where(low == 8, 0, low) | torch.where(high == 8, 0, high) << 4


@pytest.mark.parametrize("to", TARGETS)
def test_the_values_are_those_of_quantize(to: str, tmp_path: Path) -> None:
    """Whatever file and name they have; and ktk loads them as they are."""
    source, output = models.write(tmp_path / "source"), tmp_path / to
    convert_checkpoint(source, output, to=to)
    formats = {"int4": "u4-bf16-g128", "fp8": "e4m3-f32-row", "mxfp4": "e2m1-ue8m0-g32"}
    with SafetensorsCheckpoint(output) as checkpoint:
        values = checkpoint.layer(1).values(2).matrices
    for part, matrix in values.items():
        weight = made.weight(part, 1, 2)
        factor = None
        if to == "nvfp4":
            largest = max(float(made.weight(p, 1, 2).abs().max()) for p in _together(part))
            factor = 2.0 ** math.ceil(math.log2(largest / 2688))
        want = quantize(weight, formats.get(to, "e2m1-e4m3-g16"), factor=factor)
        assert torch.equal(matrix.data, dequantize(want, torch.float64))
    moe = ktk.MoE.from_checkpoint(output, 1)
    assert moe.backend.name == BACKENDS[to]
    for got, matrix in zip(moe.unpack_expert(2), values.values(), strict=True):
        assert torch.equal(torch.from_numpy(got), matrix.data.float())


def _together(part: str) -> tuple[str, ...]:
    return ("down",) if part == "down" else ("gate", "up")


def test_gate_and_up_of_nvfp4_share_a_power_of_two(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    convert_checkpoint(source, output, to="nvfp4")
    tensors = models.tensors(output)
    for name in [one for one in tensors if one.endswith("gate_proj.weight_global_scale")]:
        gate, up = (tensors[name.replace("gate_proj", part)] for part in ("gate_proj", "up_proj"))
        assert torch.equal(gate, up)
        assert math.frexp(gate.item())[0] == 0.5
        largest = max(
            tensors[name.replace("gate_proj.weight_global", f"{part}.weight")].float().max()
            for part in ("gate_proj", "up_proj")
        )
        assert 224 <= largest <= 448


def test_all_else_stays_as_it_is(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    convert_checkpoint(source, output, to="int4", shard_nbytes=300_000)
    before, after = models.tensors(source), models.tensors(output)
    for name, tensor in before.items():
        assert (name in after) == (".experts." not in name)
        if name in after:
            assert after[name].dtype == tensor.dtype
            assert torch.equal(after[name], tensor)
    files = models.contents(output)
    for name in models.OTHERS:
        assert files[name] == (source / name).read_bytes()
    assert not set(models.LEFT) & set(files)
    shards = [name for name in files if name.endswith(".safetensors")]
    assert shards == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, 1 + len(shards))
    ]
    assert len(shards) > 2
    # The header's own few bytes aside.
    assert all(len(files[name]) < 310_000 for name in shards)
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in after.values())


def test_no_model_in_config_keeps_what_it_said_of_codes(tmp_path: Path) -> None:
    """However deep: readers take what is nearest to the experts."""
    old = {"quant_method": "gptq", "bits": 8, "checkpoint_format": "marlin"}
    deep = {"a": 1, "text_config": {"quantization_config": old, "b": [{"compression_config": old}]}}
    source = models.write(tmp_path / "source", thinker_config=deep)
    convert_checkpoint(source, tmp_path / "to", to="int4")
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    assert config["thinker_config"] == {"a": 1, "text_config": {"b": [{}]}}
    with SafetensorsCheckpoint(tmp_path / "to") as checkpoint:
        assert checkpoint.config.quantization.method == "compressed-tensors"
        checkpoint.layer(0)


def test_what_config_says(tmp_path: Path) -> None:
    old = {"quant_method": "compressed-tensors", "config_groups": {}}
    source = models.write(
        tmp_path / "source",
        quantization_config=old,
        text_config={"compression_config": old, "a": 1},
    )
    output = tmp_path / "to"
    convert_checkpoint(source, output, to="fp8")
    config = json.loads((output / "config.json").read_text())
    assert config["text_config"] == {"a": 1}
    assert config["num_experts"] == made.E
    said = config["quantization_config"]
    assert said["format"] == "float-quantized"
    [ignore] = said["ignore"]
    modules = {name.rpartition(".")[0] for name in models.tensors(output)}
    pattern = re.compile(ignore.removeprefix("re:"))
    assert {name for name in modules if not pattern.match(name)} == {
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj"
        for layer in (0, 1)
        for e in range(made.E)
        for part in made.PARTS
    }
    # What vLLM asks for a layer of experts.
    assert not pattern.match("model.layers.0.mlp.experts")
    assert pattern.match("model.layers.0.mlp.shared_experts.gate_up_proj")


def test_experts_that_are_not_converted_are_ignored(tmp_path: Path) -> None:
    """Such as those of Qwen3-Omni's talker."""
    from safetensors.torch import load_file, save_file

    source = models.write(tmp_path / "source")
    tensors = load_file(source / "one.safetensors")
    name = "talker.layers.0.mlp.experts.0.up_proj.weight"
    tensors[name] = torch.ones(2, 2)
    save_file(tensors, source / "one.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"][name] = "one.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    convert_checkpoint(source, tmp_path / "to", to="fp8")
    config = json.loads((tmp_path / "to" / "config.json").read_text())
    ignored = [re.compile(one[3:]) for one in config["quantization_config"]["ignore"]]

    def is_ignored(module: str) -> bool:
        return any(one.match(module) for one in ignored)

    assert is_ignored("talker.layers.0.mlp.experts.0.up_proj")
    assert not is_ignored("model.layers.0.mlp.experts.0.up_proj")
    assert torch.equal(models.tensors(tmp_path / "to")[name], tensors[name])


@pytest.mark.parametrize(("group", "sizes"), [(32, SIZES[0]), (0, SIZES[1]), (16, SIZES[1])])
def test_groups_of_int4(group: int, sizes: made.Sizes, tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source", sizes), tmp_path / "to"
    convert_checkpoint(source, output, to="int4", group_size=group)
    with SafetensorsCheckpoint(output) as checkpoint:
        layer = checkpoint.layer(0)
        assert layer.format.group_k == group
        want = quantize(made.weight("down", 0, 1, sizes), layer.format)
        found = layer.values(1).down
        assert torch.equal(found.data, dequantize(want, torch.float64))
    entries = json.loads((output / "config.json").read_text())["quantization_config"]
    weights = entries["config_groups"]["group_0"]["weights"]
    assert weights["strategy"] == ("group" if group else "channel")
    assert weights.get("group_size", 0) == group


def test_zeros_and_little_weights(tmp_path: Path) -> None:
    """Groups, matrices and experts of zeros, and values that leave no f32 for a factor."""
    from safetensors.torch import load_file, save_file

    source = made.write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    tensors[f"{stem}0.gate_proj.weight"][:] = 0
    tensors[f"{stem}1.gate_proj.weight"][:] = 0
    tensors[f"{stem}1.up_proj.weight"][:] = 0
    tensors[f"{stem}2.down_proj.weight"].fill_(1e-38)
    tensors[f"{stem}2.up_proj.weight"][:, :32] = 0
    save_file(tensors, source / "model.safetensors")
    for to in TARGETS:
        convert_checkpoint(source, tmp_path / to, to=to)
        with SafetensorsCheckpoint(tmp_path / to) as checkpoint:
            layer = checkpoint.layer(0)
            for expert in range(made.E):
                for matrix in layer.values(expert).matrices.values():
                    assert torch.isfinite(matrix.data).all()
            assert not layer.values(1).up.data.any()
            assert not layer.values(2).up.data[:, :32].any()


def test_experts_that_share_tensors_get_tensors_of_their_own(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    apart = made.write(tmp_path / "apart", layers=(0,))
    tensors = load_file(apart / "model.safetensors")

    def stack(*parts: str) -> torch.Tensor:
        return torch.stack(
            [
                torch.cat(
                    [tensors[f"model.layers.0.mlp.experts.{e}.{p}_proj.weight"] for p in parts]
                )
                for e in range(made.E)
            ]
        )

    shared = tmp_path / "shared"
    shared.mkdir()
    stem = "model.layers.0.mlp.experts."
    save_file(
        {f"{stem}gate_up_proj": stack("gate", "up"), f"{stem}down_proj": stack("down")},
        shared / "model.safetensors",
    )
    (shared / "config.json").write_text((apart / "config.json").read_text())
    for source in (apart, shared):
        convert_checkpoint(source, tmp_path / f"{source.name}-to", to="mxfp4")
    one, other = (models.tensors(tmp_path / f"{name}-to") for name in ("apart", "shared"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("fmt", [made.BLOCKS, made.GROUPS, made.NV], ids=str)
def test_experts_in_codes_are_decoded_and_quantized_again(fmt: ktk.Format, tmp_path: Path) -> None:
    source, output = made.write(tmp_path / "source", fmt), tmp_path / "to"
    convert_checkpoint(source, output, to="fp8")
    with SafetensorsCheckpoint(source) as before, SafetensorsCheckpoint(output) as after:
        values = before.layer(0).values(0, torch.float32).up
        want = quantize(values.data, "e4m3-f32-row")
        assert torch.equal(after.layer(0).values(0).up.data, dequantize(want, torch.float64))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_other_matrices_in_codes_are_decoded(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config: dict[str, Any] = {"dtype": "float16"} if dtype == torch.float16 else {}
    source = models.write(tmp_path / "source", quantization_config=said, **config)
    tensors = load_file(source / "one.safetensors")
    stem = "model.layers.0.self_attn.q_proj"
    made_of = quantize(tensors[f"{stem}.weight"], "e4m3-f32-128x128")
    assert made_of.scale is not None
    tensors[f"{stem}.weight"] = made_of.data.view(torch.float8_e4m3fn)
    tensors |= {f"{stem}.weight_scale_inv": made_of.scale, f"{stem}.input_scale": torch.ones(1)}
    tensors[f"{stem}.bias"] = torch.ones(3)
    save_file(tensors, source / "one.safetensors")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "one.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    arguments = ["convert", str(source), str(tmp_path / "to"), "--to", "mxfp4"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "all else is copied, or decoded where it is codes (matrices: 1)" in done.stderr
    found = models.tensors(tmp_path / "to")
    assert {name for name in found if name.startswith(stem)} == {f"{stem}.weight", f"{stem}.bias"}
    assert torch.equal(found[f"{stem}.weight"], dequantize(made_of).to(dtype))
    assert torch.equal(found[f"{stem}.bias"], tensors[f"{stem}.bias"])


def test_a_factor_is_given(tmp_path: Path) -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    stack = quantize(torch.stack([weight, weight]), "e2m1-e4m3-g16", factor=0.25)
    assert isinstance(stack[1], Matrix)
    assert stack.factor is not None
    assert stack.factor.tolist() == [[0.25], [0.25]]
    with pytest.raises(ValueError, match=r"^bf16 has no factor, got 1\.0$"):
        quantize(weight, "bf16", factor=1.0)
    for wrong in (0.0, -1.0, 1e-45, math.inf, math.nan, 1e300):
        with pytest.raises(ValueError, match="factor must be a normal positive f32, got"):
            quantize(weight, "e2m1-e4m3-g16", factor=wrong)


# --- the command --------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    source, output = models.write(tmp_path / "source"), tmp_path / "to"
    arguments = ["convert", str(source), str(output), "--to", "int4", "--json"]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "layers 0-1: experts are BF16, and become u4 with bf16 scales per 1 x 128" in done.stderr
    said = json.loads(done.stdout)
    assert said["format"] == "u4-bf16-g128"
    assert said["layers"] == [0, 1]
    assert [one["kept"] for one in said["files"]] == [False]
    expected: dict[str, Any] = {"to": "int4", "group_size": 128}
    convert_checkpoint(source, tmp_path / "same", **expected)
    assert models.contents(tmp_path / "same") == models.contents(output)
    again = runner.invoke(app, [*arguments, "--resume"])
    assert again.exit_code == 0, again.output
    assert "1 of 1 files are there already" in again.stderr
    assert json.loads(again.stdout)["files"][0]["kept"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give one of them: a backend of ktk, or a format"),
        (["--to", "int4", "--backend", "FP8"], "give one of them"),
        (["--to", "int5"], "'int5' is none of int4, fp8, nvfp4, mxfp4"),
        (["--to", "int4", "--layers", "0"], "--to converts all layers"),
    ],
)
def test_wrong_command_lines(options: list[str], message: str, tmp_path: Path) -> None:
    done = runner.invoke(app, ["convert", str(tmp_path), str(tmp_path / "to"), *options])
    assert done.exit_code == 2
    assert message in " ".join(done.stderr.split())
    assert not (tmp_path / "to").exists()
