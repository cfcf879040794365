"""What is wrong with a quantised checkpoint is named; what only looks so is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from schemes import (
    FP8_CONFIG,
    NAMES,
    PREFIX,
    SCHEMES,
    SIZES,
    U4_ZERO,
    E,
    H,
    I,
    assert_reads,
    compressed,
    ct,
    sources,
    tensors_of,
    with_zeros,
    write,
)

from ktk import Format
from ktk.checkpoint.quantization import read_quantization
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.errors import CheckpointError

DOWN1 = NAMES["down"].format(e=1)
UP0 = NAMES["up"].format(e=0)


def read_all(folder: Path) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint:
        layer = checkpoint.layer(3)
        for e in range(E):
            layer.expert(e)


def broken(folder: Path, scheme: str, changes: dict[str, Any], **config: Any) -> str:
    """Write a checkpoint with some tensors exchanged (None: left out), and return the error."""
    fmt, make, quantization = SCHEMES[scheme]
    matrices = with_zeros(1, 16) if fmt == U4_ZERO else sources(fmt)
    tensors = tensors_of(matrices, make)
    for name, array in changes.items():
        tensors.pop(name, None)
        if array is not None:
            tensors[name] = array
    write(folder, tensors, {**quantization, **config})
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "fp8 by blocks", {f"{DOWN1}.weight_scale_inv": None})
    file = tmp_path / "model.safetensors"
    needs = f"needs {DOWN1}.weight_scale_inv, which is missing"
    assert message == f"tensor {DOWN1}.weight in {file} {needs}"


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "int4", {f"{UP0}.weight_scale": torch.ones(I, 3).bfloat16()})
    for part in (f"{UP0}.weight_scale in ", "model.safetensors", "[160, 3]", "[160, 6]", "N K/G"):
        assert part in message


def test_a_wrong_type_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "mxfp4", {f"{UP0}.weight_packed": torch.ones(I, H // 2).char()})
    assert f"{UP0}.weight_packed in " in message
    assert "has elements of type I8, expected U8" in message


@pytest.mark.parametrize("what", ["scales", "zero points", "floats"])
def test_an_expert_in_another_format_is_named(tmp_path: Path, what: str) -> None:
    """Types of one size, above all: as bytes they would pass for each other."""
    gate, down = NAMES["gate"].format(e=0), NAMES["down"].format(e=1)
    if what == "floats":
        made = {NAMES[part].format(e=e): SIZES[part] for part in SIZES for e in range(E)}
        tensors = {f"{name}.weight": torch.ones(size).bfloat16() for name, size in made.items()}
        tensors[f"{down}.weight"] = tensors[f"{down}.weight"].half()
        name, formats_ = "weight", ("f16", "bf16")
    else:
        tensors = tensors_of(with_zeros(0, 15), compressed)
        name = "weight_packed"
        if what == "scales":
            scale = tensors[f"{down}.weight_scale"]
            tensors[f"{down}.weight_scale"] = scale.bfloat16()
            formats_ = (str(Format("u4", "bf16", "u8", 1, 32)), str(U4_ZERO))
        else:
            del tensors[f"{down}.weight_zero_point"]
            formats_ = (str(Format("u4", "f16", "none", 1, 32)), str(U4_ZERO))
    write(tmp_path, tensors, {})
    with pytest.raises(CheckpointError) as caught:
        read_all(tmp_path)
    file = tmp_path / "model.safetensors"
    assert str(caught.value) == (
        f"tensor {down}.{name} in {file} is stored as {formats_[0]}, "
        f"but {gate}.{name} as {formats_[1]}"
    )


def test_columns_in_order_are_no_matter_what_was_asked_for(tmp_path: Path) -> None:
    fmt, make, config = SCHEMES["gptq"]
    matrices = with_zeros(1, 16)
    write(tmp_path, tensors_of(matrices, make), {**config, "desc_act": True})
    assert_reads(tmp_path, matrices, fmt)


def test_zero_points_that_contradict_the_configuration_are_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "gptq", {}, sym=True)
    assert "has zero points, though config.json says that it is symmetric" in message


def test_zero_points_that_are_missing_are_named(tmp_path: Path) -> None:
    config = ct(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    message = broken(tmp_path, "int4", {}, **config)
    assert message.startswith(f"tensor {NAMES['gate'].format(e=0)}.weight_packed in {tmp_path}")
    assert "has no zero points, though config.json says that it is not symmetric" in message


def test_int8_without_the_zero_points_that_config_announces(tmp_path: Path) -> None:
    config = ct(num_bits=8, type="int", strategy="channel", symmetric=False)
    message = broken(tmp_path, "int8 by rows", {}, **config)
    assert message.startswith(f"tensor {NAMES['gate'].format(e=0)}.weight in {tmp_path}")
    assert "has no zero points, though config.json says that it is not symmetric" in message


def test_zero_points_of_int8_that_are_all_zero_change_nothing(tmp_path: Path) -> None:
    fmt, make, config = SCHEMES["int8 by rows"]
    matrices = sources(fmt)
    tensors = tensors_of(matrices, make)
    tensors[f"{DOWN1}.weight_zero_point"] = torch.zeros(H, 1).char()
    write(tmp_path, tensors, config)
    assert_reads(tmp_path, matrices, fmt)


@pytest.mark.parametrize("shape", [(1,), (H,), (H, 1)])
def test_zero_points_of_int8_are_read_whatever_shape_scales_have(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    fmt, make, config = SCHEMES["int8 by rows"]
    tensors = tensors_of(sources(fmt), make)
    tensors[f"{DOWN1}.weight_zero_point"] = torch.full(shape, 3).char()
    write(tmp_path, tensors, config)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        found = checkpoint.layer(3).values(1, torch.float64).down.data
    codes = tensors[f"{DOWN1}.weight"].double() - 3
    want = codes * tensors[f"{DOWN1}.weight_scale"].double()
    assert torch.equal(found, want.float().double())


def test_another_group_size_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "gptq", {}, group_size=64)
    assert ".scales in " in message or ".qzeros in " in message
    assert "config.json means [3, 160]" in message


def test_another_width_than_config_says_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "gptq", {}, bits=8)
    assert ".qweight in " in message
    assert "(K*b/32 N)" in message


def test_a_matrix_that_was_left_in_floats_is_named(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        f"{DOWN1}.{name}": None for name in ("weight_packed", "weight_scale")
    }
    message = broken(tmp_path, "int4", {**changes, f"{DOWN1}.weight": torch.ones(H, I).bfloat16()})
    assert f"no tensor {DOWN1}.weight_packed" in message


def test_an_unknown_scheme_lists_what_is_there(tmp_path: Path) -> None:
    made = {
        NAMES[part].format(e=e) + suffix: torch.ones(4, dtype=torch.uint8)
        for part in SIZES
        for e in range(E)
        for suffix in (".weight", ".weight.absmax")
    }
    write(tmp_path, made, {"quant_method": "bitsandbytes"})
    gate = NAMES["gate"].format(e=0)
    with pytest.raises(CheckpointError) as caught, SafetensorsCheckpoint(tmp_path) as checkpoint:
        checkpoint.layer(3)
    for part in (f"tensor {gate}.weight in ", f"{gate}.weight.absmax (U8)", "bitsandbytes"):
        assert part in str(caught.value)


def test_scales_that_gate_and_up_share_are_refused(tmp_path: Path) -> None:
    both = torch.zeros(E, 2 * I, H).to(torch.float8_e4m3fn)
    tensors = {
        f"{PREFIX}mlp.experts.gate_up_proj": both,
        f"{PREFIX}mlp.experts.gate_up_proj_scale_inv": torch.ones(E, 3, 2),
        f"{PREFIX}mlp.experts.down_proj": torch.zeros(E, H, I).to(torch.float8_e4m3fn),
        f"{PREFIX}mlp.experts.down_proj_scale_inv": torch.ones(E, 2, 2),
    }
    write(tmp_path, tensors, FP8_CONFIG)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match="has scales per 128 rows, of gate and of up tog"):
            layer.expert(0)


def test_groups_that_differ_are_left_to_the_tensors() -> None:
    """Attention and experts quantised apart: what they do not agree on is not said."""
    groups = {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}},
        "group_1": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}},
    }
    found = read_quantization({"quantization_config": {"config_groups": groups}})
    assert (found.bits, found.group_size, found.symmetric) == (4, None, True)
    assert not found.mixed
    groups["group_1"]["weights"]["num_bits"] = 8
    found = read_quantization({"quantization_config": {"config_groups": groups}})
    assert (found.bits, found.mixed) == (None, True)
