"""Quantised checkpoints are read without loss, whoever wrote them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from schemes import (
    AWQ_CONFIG,
    BLOCK,
    FP8_CONFIG,
    GPTQ_CONFIG,
    MXFP4,
    MXFP8,
    PREFIX,
    ROW,
    SCHEMES,
    SIZES,
    U4_ZERO,
    W_NAMES,
    E,
    Tensors,
    assert_reads,
    awq,
    compressed,
    ct,
    deepseek_v4,
    e4m3,
    fp8,
    fp8_row,
    gptq,
    sources,
    tensor,
    tensors_of,
    with_zeros,
    write,
)

from ktk import Format, MoE
from ktk.checkpoint import describe
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.errors import CheckpointError
from ktk.testing import formats


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
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        found = checkpoint.layer(3).expert(1)
    for part, matrix in found.matrices.items():
        assert matrix.bias is not None
        assert torch.equal(matrix.bias, biases[part][1])


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


def test_bytes_of_four_bits_are_no_integers_where_config_says_floats(tmp_path: Path) -> None:
    matrices = sources(SCHEMES["int4 in bytes"][0])
    made = tensors_of(matrices, SCHEMES["int4 in bytes"][1])
    write(tmp_path, made, ct(num_bits=4, type="float", group_size=32))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match=r"holds 4-bit floats, as config\.json says"):
            layer.expert(0)


@pytest.mark.parametrize("name", ["int4 in bytes", "int4 of 256"])
def test_rawint4_stores_them_to_the_bit(tmp_path: Path, name: str) -> None:
    fmt, make, config = SCHEMES[name]
    matrices = sources(fmt)
    write(tmp_path, tensors_of(matrices, make), config)
    moe = MoE.from_checkpoint(tmp_path, 3)
    assert (moe.backend.name, moe.format) == ("RAWINT4", fmt)
    for e in range(E):
        for part, found in zip(SIZES, moe.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(found, matrices[part, e].values.astype(np.float32))
