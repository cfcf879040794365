"""Quantised checkpoints are read without loss, whoever wrote them, and what is wrong is named.

The packings are written here by plain loops from the words of their formats;
test_quantized_oracle.py has checkpoints that compressed-tensors writes itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ktk import Format
from ktk.checkpoint import describe
from ktk.checkpoint.experts import Checkpoint
from ktk.checkpoint.quantization import read_quantization
from ktk.errors import CheckpointError
from ktk.testing import formats

E, H, I = 2, 192, 160  # noqa: E741 - the names the table of families uses
SIZES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
Tensors = dict[str, torch.Tensor]
Values = dict[tuple[str, int], np.ndarray]
CONFIG: dict[str, Any] = {
    "model_type": "any_moe",
    "num_experts": E,
    "num_experts_per_tok": 1,
    "hidden_size": H,
    "moe_intermediate_size": I,
}
PREFIX = "model.layers.3."
NAMES = {part: f"{PREFIX}mlp.experts.{{e}}.{part}_proj" for part in SIZES}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def sources(fmt: Format, seed: int = 0) -> dict[tuple[str, int], formats.Source]:
    """Random matrices of every expert in a format, with the values that the kit says they mean."""
    rng = np.random.default_rng(seed)
    return {
        (part, e): formats.make_source(fmt, rng.standard_normal(size).astype(np.float32), rng)
        for part, size in SIZES.items()
        for e in range(E)
    }


def with_zeros(low: int, high: int) -> dict[tuple[str, int], formats.Source]:
    """Matrices with zero points, those that a packing of four bits can hold."""
    found = {}
    for key, source in sources(U4_ZERO).items():
        zero = np.clip(source.zero, low, high)
        _, k = source.values.shape
        moved = (source.zero.astype(float) - zero) * source.scale.astype(float)
        values = source.values + moved.repeat(source.format.group_k, axis=1)[:, :k]
        found[key] = dataclasses.replace(source, zero=zero, values=values)
    return found


def codes_of(source: formats.Source) -> np.ndarray:
    """The 4-bit codes [n, k]."""
    return np.stack([source.data & 15, source.data >> 4], axis=-1).reshape(source.values.shape)


def words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight codes to an int32 along an axis; bits 4 i get column order[i] of eight."""
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)])
    eight = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = sum(eight[..., order[i]] << np.uint64(4 * i) for i in range(8))
    packed = np.moveaxis(np.asarray(packed, np.uint32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(array).contiguous()


U4 = Format("u4", "bf16", "none", 1, 32)
U4_HALF = Format("u4", "f16", "none", 1, 64)
U4_ZERO = Format("u4", "f16", "u8", 1, 32)
U4_ROW = Format("u4", "bf16", "none", 1, 0)
BLOCK = Format("e4m3", "f32", "none", 128, 128)
ROW = Format("e4m3", "f32", "none", 1, 0)
INT8 = Format("i8", "f32", "none", 1, 0)
MXFP8 = Format("e4m3", "ue8m0", "none", 1, 32)
MXFP4 = Format("e2m1", "ue8m0", "none", 1, 32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def e4m3(source: formats.Source) -> torch.Tensor:
    return tensor(source.data).view(torch.float8_e4m3fn)


def fp8(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale_inv": tensor(source.scale)}


def fp8_row(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale": tensor(source.scale)}


def mx_bytes(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale_inv": tensor(source.scale)}


def int8(source: formats.Source) -> Tensors:
    return {".weight": tensor(source.data), ".weight_scale": tensor(source.scale)}


def compressed(source: formats.Source) -> Tensors:
    found = {
        ".weight_packed": words(codes_of(source), 1),
        ".weight_scale": tensor(source.scale),
        ".weight_shape": torch.tensor(source.values.shape),
    }
    if source.zero is not None:
        found[".weight_zero_point"] = words(source.zero, 0)
    return found


def gptq(source: formats.Source, offset: int = 1) -> Tensors:
    groups = source.scale.shape[1]
    zero = source.zero if source.zero is not None else np.full((source.scale.shape[0], groups), 8)
    k = source.values.shape[1]
    return {
        ".qweight": words(codes_of(source).T, 0),
        ".qzeros": words((zero.astype(int) - offset).T, 1),
        ".scales": tensor(source.scale).T.contiguous(),
        ".g_idx": (torch.arange(k) // source.format.group_k).int(),
    }


def awq(source: formats.Source) -> Tensors:
    return {
        ".qweight": words(codes_of(source).T, 1, AWQ_ORDER),
        ".qzeros": words(source.zero.T, 1, AWQ_ORDER),
        ".scales": tensor(source.scale).T.contiguous(),
    }


def deepseek_v4(source: formats.Source) -> Tensors:
    return {
        ".weight": tensor(source.data).view(torch.int8),
        ".scale": tensor(source.scale).view(torch.float8_e8m0fnu),
    }


def packed_mxfp4(source: formats.Source) -> Tensors:
    return {".weight_packed": tensor(source.data), ".weight_scale": tensor(source.scale)}


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ_SYM = {**GPTQ_CONFIG, "group_size": 64, "sym": True}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


def ct(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


#: name -> format, what one matrix becomes, quantization_config
Writer = Callable[[formats.Source], Tensors]
SCHEMES: dict[str, tuple[Format, Writer, dict[str, Any]]] = {
    "fp8 by blocks": (BLOCK, fp8, FP8_CONFIG),
    "fp8 by rows": (ROW, fp8_row, ct(num_bits=8, type="float", strategy="channel")),
    "mxfp8": (MXFP8, mx_bytes, {"quant_method": "mxfp8"}),
    "int8 by rows": (INT8, int8, ct(num_bits=8, type="int", strategy="channel")),
    "int4": (U4, compressed, ct(num_bits=4, type="int", strategy="group", group_size=32)),
    "int4, group not said": (U4, compressed, {}),
    "int4 by rows": (U4_ROW, compressed, ct(num_bits=4, type="int", strategy="channel")),
    "gptq": (U4_ZERO, gptq, GPTQ_CONFIG),
    "gptq, symmetric": (U4_HALF, gptq, GPTQ_SYM),
    "mxfp4": (MXFP4, packed_mxfp4, {"quant_method": "compressed-tensors"}),
    "mxfp4 of DeepSeek-V4": (MXFP4, deepseek_v4, {"quant_method": "fp8"}),
}


def tensors_of(matrices: dict[tuple[str, int], formats.Source], make: Writer) -> Tensors:
    return {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in make(source).items()
    }


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any], **config: Any) -> Path:
    entries = {**CONFIG, "quantization_config": quantization, **config}
    (folder / "config.json").write_text(json.dumps(entries))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_reads(
    folder: Path, expected: dict[tuple[str, int], formats.Source], fmt: Format
) -> None:
    with Checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(3)
        assert checkpoint.given(layer) == fmt
        for e in range(E):
            for part, matrix in checkpoint.matrices(layer, e).items():
                assert matrix.format == fmt
                got = matrix.dequantize(torch.float64).numpy()
                np.testing.assert_array_equal(got, expected[part, e].values, f"{part} of {e}")
            for array in checkpoint.expert(layer, e).values():
                assert array.is_contiguous()


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_read_to_the_bit(tmp_path: Path, name: str) -> None:
    fmt, make, config = SCHEMES[name]
    matrices = with_zeros(1, 16) if fmt == U4_ZERO else sources(fmt)
    write(tmp_path, tensors_of(matrices, make), config)
    assert_reads(tmp_path, matrices, fmt)
    assert str(describe(tmp_path)).endswith(f"1 per token, {fmt}, in layers 3")


@pytest.mark.parametrize(
    "family", ["mlp.experts.{e}.{p}_proj", "ffn.experts.{e}.{w}", "experts.{e}.{w}"]
)
def test_schemes_and_families_are_orthogonal(tmp_path: Path, family: str) -> None:
    matrices = sources(MXFP4)
    tensors = {
        PREFIX + family.format(e=e, p=part, w=W_NAMES[part]) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in deepseek_v4(source).items()
    }
    write(tmp_path, tensors, {})
    assert_reads(tmp_path, matrices, MXFP4)


def test_zero_points_of_compressed_tensors(tmp_path: Path) -> None:
    matrices = with_zeros(0, 15)
    config = ct(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    write(tmp_path, tensors_of(matrices, compressed), config)
    assert_reads(tmp_path, matrices, U4_ZERO)


def test_awq_interleaves_its_columns(tmp_path: Path) -> None:
    matrices = with_zeros(0, 15)
    write(tmp_path, tensors_of(matrices, awq), AWQ_CONFIG)
    assert_reads(tmp_path, matrices, U4_ZERO)


def test_the_second_format_of_gptq_stores_zero_points_as_they_are(tmp_path: Path) -> None:
    matrices = with_zeros(0, 15)
    made = tensors_of(matrices, lambda source: gptq(source, offset=0))
    write(tmp_path, made, {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"})
    assert_reads(tmp_path, matrices, U4_ZERO)


def test_scales_of_blocks_may_be_bf16_or_powers_of_two(tmp_path: Path) -> None:
    matrices = sources(Format("e4m3", "bf16", "none", 128, 128))
    write(tmp_path, tensors_of(matrices, fp8), FP8_CONFIG)
    assert_reads(tmp_path, matrices, BLOCK)
    matrices = sources(Format("e4m3", "ue8m0", "none", 128, 128))
    write(tmp_path, tensors_of(matrices, fp8), FP8_CONFIG)
    assert_reads(tmp_path, matrices, BLOCK)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_mxfp8_may_be_called_blocks_of_32(tmp_path: Path, name: str) -> None:
    matrices = sources(MXFP8)
    made = tensors_of(
        matrices, lambda source: {".weight": e4m3(source), f".{name}": tensor(source.scale)}
    )
    write(tmp_path, made, {"quant_method": "mxfp8", "weight_block_size": [1, 32]})
    assert_reads(tmp_path, matrices, MXFP8)


def test_one_scale_for_a_matrix_is_repeated_for_its_rows(tmp_path: Path) -> None:
    matrices = sources(Format("e4m3", "f32", "none", 0, 0))
    made = tensors_of(matrices, fp8_row)
    for name, scale in made.items():
        if name.endswith("scale"):
            made[name] = scale.reshape(())
    write(tmp_path, made, {"quant_method": "fp8"})
    assert_reads(tmp_path, matrices, ROW)


def gpt_oss(matrices: dict[tuple[str, int], formats.Source]) -> tuple[Tensors, Tensors]:
    """Blocks of 16 bytes, gate and up alternating, biases; returns tensors and biases."""
    biases = {part: torch.randn(E, SIZES[part][0]) for part in SIZES}
    tensors: Tensors = {}
    for name in ("data", "scale"):
        gate, up, down = (
            torch.stack([tensor(getattr(matrices[part, e], name)) for e in range(E)])
            for part in SIZES
        )
        both = torch.stack([gate, up], dim=2).flatten(1, 2)
        suffix = {"data": "_blocks", "scale": "_scales"}[name]
        for part, array in {"gate_up": both, "down": down}.items():
            if name == "data":
                array = array.view(E, array.shape[1], -1, 16)
            tensors[f"{PREFIX}mlp.experts.{part}_proj{suffix}"] = array.contiguous()
    both = torch.stack([biases["gate"], biases["up"]], dim=2).flatten(1)
    tensors[f"{PREFIX}mlp.experts.gate_up_proj_bias"] = both.bfloat16()
    tensors[f"{PREFIX}mlp.experts.down_proj_bias"] = biases["down"].bfloat16()
    return tensors, {part: bias.bfloat16() for part, bias in biases.items()}


def test_gpt_oss_has_blocks_biases_and_alternating_rows(tmp_path: Path) -> None:
    matrices = sources(MXFP4)
    tensors, biases = gpt_oss(matrices)
    write(tmp_path, tensors, {"quant_method": "mxfp4"}, model_type="gpt_oss")
    assert_reads(tmp_path, matrices, MXFP4)
    with Checkpoint(tmp_path) as checkpoint:
        found = checkpoint.biases(checkpoint.layer(3), 1)
    assert found.keys() == {f"{part}_bias" for part in biases}
    for part, bias in biases.items():
        assert torch.equal(found[f"{part}_bias"], bias[1])


def test_experts_that_share_tensors_may_be_fp8(tmp_path: Path) -> None:
    """As transformers keeps them in memory: gate above up, blocks of scales likewise."""
    matrices = sources(Format("e4m3", "f32", "none", 32, 32))
    tensors: Tensors = {}
    for suffix, name in {"": "data", "_scale_inv": "scale"}.items():
        gate, up, down = (
            torch.stack([tensor(getattr(matrices[part, e], name)) for e in range(E)])
            for part in SIZES
        )
        for part, array in {"gate_up": torch.cat([gate, up], dim=1), "down": down}.items():
            array = array.view(torch.float8_e4m3fn) if name == "data" else array
            tensors[f"{PREFIX}mlp.experts.{part}_proj{suffix}"] = array
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    write(tmp_path, tensors, config)
    assert_reads(tmp_path, matrices, Format("e4m3", "f32", "none", 32, 32))


# --- what is wrong is named ---------------------------------------------------------------------

DOWN1 = NAMES["down"].format(e=1)
UP0 = NAMES["up"].format(e=0)


def read_all(folder: Path) -> None:
    with Checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(3)
        for e in range(E):
            checkpoint.expert(layer, e)


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


def test_columns_out_of_order_are_refused(tmp_path: Path) -> None:
    order = torch.arange(H).flip(0).int() // 32
    message = broken(tmp_path, "gptq", {f"{UP0}.g_idx": order}, desc_act=True)
    assert message.startswith(f"tensor {UP0}.qweight in {tmp_path}")
    assert "desc_act" in message


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


def test_int8_with_zero_points_is_refused(tmp_path: Path) -> None:
    zero = {f"{DOWN1}.weight_zero_point": torch.arange(H).char().view(-1, 1)}
    message = broken(tmp_path, "int8 by rows", zero)
    assert message.startswith(f"tensor {DOWN1}.weight in {tmp_path}")
    assert message.endswith("is int8 with zero points; ktk reads int8 without them only")
    config = ct(num_bits=8, type="int", strategy="channel", symmetric=False)
    assert "is int8 with zero points" in broken(tmp_path, "int8 by rows", {}, **config)


def test_zero_points_of_int8_that_are_all_zero_change_nothing(tmp_path: Path) -> None:
    fmt, make, config = SCHEMES["int8 by rows"]
    matrices = sources(fmt)
    tensors = tensors_of(matrices, make)
    tensors[f"{DOWN1}.weight_zero_point"] = torch.zeros(H, 1).char()
    write(tmp_path, tensors, config)
    assert_reads(tmp_path, matrices, fmt)


def test_another_group_size_is_named(tmp_path: Path) -> None:
    message = broken(tmp_path, "gptq", {}, group_size=64)
    assert ".scales in " in message or ".qzeros in " in message
    assert "config.json means [3, 160]" in message


def test_eight_bits_are_named(tmp_path: Path) -> None:
    wide = torch.zeros(H // 4, I, dtype=torch.int32)
    changes = {
        f"{NAMES[part].format(e=e)}.qweight": wide.clone() for part in SIZES for e in range(E)
    }
    message = broken(tmp_path, "gptq", changes, bits=8)
    assert ".qweight in " in message
    assert "(K/8 N)" in message


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
    with pytest.raises(CheckpointError) as caught, Checkpoint(tmp_path) as checkpoint:
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
    message = "has scales per 128 rows, of gate and of up together"
    with pytest.raises(CheckpointError, match=message), Checkpoint(tmp_path) as checkpoint:
        checkpoint.expert(checkpoint.layer(3), 0)


def test_groups_that_differ_are_left_to_the_tensors() -> None:
    """Attention and experts quantised apart: what they do not agree on is not said."""
    groups = {
        "group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}},
        "group_1": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}},
    }
    found = read_quantization({"quantization_config": {"config_groups": groups}})
    assert (found.bits, found.group_size, found.symmetric) == (4, None, True)
