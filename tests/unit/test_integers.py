"""Integers of all widths, in groups of all sizes and columns in any order, mean what they did.

Codes are packed here as one long number for each row, and values are computed in float64 from the
definition: (code - zero) * scale of the group that a column belongs to.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import F32, assert_loads, assert_means, save
from safetensors.torch import save_file
from schemes import CONFIG, PREFIX, SIZES, E, Tensors, ct
from written import Integers, all_random, gptq, stream, values

import ktk
from ktk import Format
from ktk.checkpoint import describe, open_checkpoint
from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.integers import int8
from ktk.checkpoint.safetensors.scheme import Layout, StorageError
from ktk.checkpoint.safetensors.tensors import read_tensors
from ktk.errors import CheckpointError


def compressed(one: Integers, bits: int, *, zeros: bool = False, order: bool = False) -> Tensors:
    """pack-quantized: rows of words; zero points in words along the rows."""
    found = {
        ".weight_packed": stream(one.codes, bits),
        ".weight_scale": one.scale,
        ".weight_shape": torch.tensor(one.codes.shape),
    }
    if zeros:
        found[".weight_zero_point"] = stream(one.zero.T, bits).T.contiguous()
    if order:
        found[".weight_g_idx"] = torch.from_numpy(one.order).int()
    return found


def config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": True, **more}


# --- GPTQ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
def test_gptq_with_columns_in_order_of_activations(tmp_path: Path, bits: int, zeros: bool) -> None:
    made = all_random(bits, 32, zeros=zeros, sort=True)
    # An expert that no token came to in calibration keeps its columns.
    one = made["up", 1]
    one.order = np.sort(one.order)
    save(
        tmp_path,
        {key: gptq(one, bits) for key, one in made.items()},
        config(bits, 32, desc_act=True, sym=not zeros),
    )
    fmt = Format("u4", "f16", "u8" if zeros else "none", 1, 32)
    if bits == 8:
        fmt = F32 if zeros else Format("i8", "f32", "none", 1, 32)
    assert_means(tmp_path, values(made), fmt)
    kept = "AMXINT4" if zeros else "RAWINT4"
    backend, dtype = ("BF16", torch.bfloat16) if bits == 8 else (kept, torch.float32)
    assert_loads(tmp_path, values(made), backend, dtype)


def uneven(one: Integers) -> Integers:
    """Give a column of the last group to the first."""
    one.order[np.flatnonzero(one.order == one.order.max())[0]] = 0
    return one


def test_groups_that_are_not_of_one_size_are_decoded(tmp_path: Path) -> None:
    made = all_random(4, 32, sort=True)
    uneven(made["down", 1])
    save(tmp_path, {key: gptq(one, 4) for key, one in made.items()}, config(4, 32, desc_act=True))
    assert_means(tmp_path, values(made), F32)
    assert_loads(tmp_path, values(made), "BF16", torch.bfloat16)
    assert str(describe(tmp_path)).endswith("integers by gptq, in layers 3")


def test_what_is_decoded_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = all_random(4, 32, sort=True)
    uneven(made["gate", 0])
    save(tmp_path, {key: gptq(one, 4) for key, one in made.items()}, config(4, 32, desc_act=True))
    caplog.set_level(logging.INFO, "ktk")
    ktk.MoE.from_checkpoint(tmp_path, 3)
    assert "layers 3: decoded to f32 and rounded; bf16" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    ktk.MoE.from_checkpoint(tmp_path, 3, "AMXINT4")
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "decoded to f32 and quantised by AMXINT4; u4" in warning.getMessage()


def test_the_first_expert_may_be_the_one_in_order(tmp_path: Path) -> None:
    made = all_random(4, 32, sort=True)
    for part in SIZES:
        made[part, 0].order = np.sort(made[part, 0].order)
    save(tmp_path, {key: gptq(one, 4) for key, one in made.items()}, config(4, 32))
    assert_means(tmp_path, values(made), Format("u4", "f16", "none", 1, 32))
    assert_loads(tmp_path, values(made), "RAWINT4", torch.float32)


def test_columns_of_groups_that_are_none_are_refused(tmp_path: Path) -> None:
    made = all_random(4, 32, sort=True)
    tensors = {key: gptq(one, 4) for key, one in made.items()}
    tensors["up", 0][".g_idx"] += 1
    save(tmp_path, tensors, config(4, 32, desc_act=True))
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        wanted = r"0\.up_proj\.qweight in .* groups 1 to 6, and has 6 of them: it is damaged"
        with pytest.raises(CheckpointError, match=wanted):
            layer.expert(0)


@pytest.mark.parametrize("order", [False, True])
def test_gptq_without_zero_points(tmp_path: Path, order: bool) -> None:
    made = all_random(4, 32)
    tensors = {key: gptq(one, 4, zeros=False, order=order) for key, one in made.items()}
    save(tmp_path, tensors, config(4, 32))
    assert_means(tmp_path, values(made), Format("u4", "f16", "none", 1, 32))
    assert_loads(tmp_path, values(made), "RAWINT4", torch.float32)


def test_gptq_without_zero_points_that_should_have_some(tmp_path: Path) -> None:
    made = {key: gptq(one, 4, zeros=False) for key, one in all_random(4, 32).items()}
    save(tmp_path, made, config(4, 32, sym=False))
    wanted = r"gate_proj\.qweight in .* has no zero points, though config\.json says that it is not"
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=wanted):
        checkpoint.layer(3).expert(0)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
def test_gptq_of_few_bits_is_stored_in_four(tmp_path: Path, bits: int, zeros: bool) -> None:
    made = all_random(bits, 32, zeros=zeros)
    tensors = {key: gptq(one, bits) for key, one in made.items()}
    save(tmp_path, tensors, config(bits, 32, sym=not zeros))
    assert_means(tmp_path, values(made), Format("u4", "f16", "u8" if zeros else "none", 1, 32))
    assert_loads(tmp_path, values(made), "AMXINT4" if zeros else "RAWINT4", torch.float32)


def test_gptq_of_eight_bits_by_rows_is_stored_as_it_is(tmp_path: Path) -> None:
    made = all_random(8, 0)
    save(tmp_path, {key: gptq(one, 8) for key, one in made.items()}, config(8, 0))
    assert_means(tmp_path, values(made), Format("i8", "f32", "none", 1, 0))
    assert_loads(tmp_path, values(made), "AMXINT8", torch.float32)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
def test_gptq_of_eight_bits_in_groups(tmp_path: Path, zeros: bool) -> None:
    made = all_random(8, 32, zeros=zeros)
    save(tmp_path, {key: gptq(one, 8) for key, one in made.items()}, config(8, 32, sym=not zeros))
    assert_means(tmp_path, values(made), F32 if zeros else Format("i8", "f32", "none", 1, 32))
    assert_loads(tmp_path, values(made), "BF16", torch.bfloat16)


def test_modules_with_rules_of_their_own_say_it_by_their_tensors(tmp_path: Path) -> None:
    """GPTQModel's `dynamic`: bits and groups that config.json gives are those of the others."""
    made = all_random(8, 64)
    tensors = {key: gptq(one, 8) for key, one in made.items()}
    dynamic = {r"+:.*\.experts\..*": {"bits": 8, "group_size": 64}}
    save(tmp_path, tensors, config(4, 128, dynamic=dynamic))
    assert_means(tmp_path, values(made), Format("i8", "f32", "none", 1, 64))


@pytest.mark.parametrize(
    "dynamic",
    [{r"-:.*attn.*": {}}, {r"-:.*attn.*": {}, r"+:.*mlp\.gate": {"sym": False}}],
    ids=["left out", "otherwise"],
)
def test_rules_that_say_nothing_of_sizes_leave_them(
    tmp_path: Path, dynamic: dict[str, Any]
) -> None:
    """Groups of 96 do not fill a row: from its scales another size would be guessed."""
    made = all_random(4, 96)
    tensors = {key: gptq(one, 4) for key, one in made.items()}
    for one in tensors.values():
        del one[".g_idx"]
    save(tmp_path, tensors, config(4, 96, dynamic=dynamic))
    assert_means(tmp_path, values(made), Format("u4", "f16", "none", 1, 96))


@pytest.mark.parametrize("group", [0, 96])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
def test_groups_that_kernels_have_not_are_divided(
    tmp_path: Path, group: int, zeros: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A row, and groups of 96, in groups that share a scale: the codes are kept."""
    made = all_random(4, group, zeros=zeros)
    tensors = {key: gptq(one, 4) for key, one in made.items()}
    save(tmp_path, tensors, config(4, group, sym=not zeros))
    assert_means(tmp_path, values(made), Format("u4", "f16", "u8" if zeros else "none", 1, group))
    caplog.set_level(logging.INFO, "ktk")
    assert_loads(tmp_path, values(made), "AMXINT4" if zeros else "RAWINT4", torch.float32)
    assert f"stored as they are; u4 with f16 scales{' and u8 zero points' * zeros} per 1 x " in (
        caplog.text
    )
    assert ("per 1 x 32" if group else "per 1 x 256") in caplog.text


def test_groups_of_tensors_that_are_brought_are_divided() -> None:
    made = all_random(4, 96)
    config = ktk.MoEConfig(
        num_experts=E, num_experts_per_tok=1, hidden_size=192, intermediate_size=160
    )
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 96, "sym": True}
    collector = ktk.ExpertCollector(
        config, ("qweight", "scales", "g_idx"), quantization=quantization
    )
    for (part, e), one in made.items():
        for suffix, tensor in gptq(one, 4, zeros=False).items():
            collector.take(e, part, suffix.lstrip("."), tensor)
    moe = collector.finish()
    assert moe.backend.name == "RAWINT4"
    for e in range(E):
        for part, matrix in zip(SIZES, moe.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(matrix, made[part, e].values.astype(np.float32))


# --- compressed-tensors -------------------------------------------------------------------------


def packed(bits: int, group: int, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return ct(num_bits=bits, type="int", **strategy, **more)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("group", [16, 32, 64, 128, 256])
def test_groups_of_compressed_tensors(tmp_path: Path, group: int, zeros: bool) -> None:
    made = all_random(4, group, zeros=zeros, dtype=torch.bfloat16)
    save(
        tmp_path,
        {key: compressed(one, 4, zeros=zeros) for key, one in made.items()},
        packed(4, group, symmetric=not zeros),
    )
    assert_means(tmp_path, values(made), Format("u4", "bf16", "u8" if zeros else "none", 1, group))
    kept = "AMXINT4" if zeros else "RAWINT4"
    backend, dtype = ("BF16", torch.bfloat16) if group == 16 else (kept, torch.float32)
    assert_loads(tmp_path, values(made), backend, dtype)


def test_compressed_tensors_in_order_of_activations(tmp_path: Path) -> None:
    made = all_random(4, 32, sort=True, zeros=True)
    save(
        tmp_path,
        {key: compressed(one, 4, zeros=True, order=True) for key, one in made.items()},
        packed(4, 32, symmetric=False, actorder="group"),
    )
    assert_means(tmp_path, values(made), Format("u4", "f16", "u8", 1, 32))
    assert_loads(tmp_path, values(made), "AMXINT4", torch.float32)


@pytest.mark.parametrize("said", [True, False], ids=["config says 8", "config says nothing"])
@pytest.mark.parametrize("group", [0, 32, 64])
def test_eight_bits_of_compressed_tensors(tmp_path: Path, group: int, said: bool) -> None:
    made = all_random(8, group)
    tensors = {key: compressed(one, 8) for key, one in made.items()}
    save(tmp_path, tensors, packed(8, group) if said else {})
    assert_means(tmp_path, values(made), Format("i8", "f32", "none", 1, group))
    backend, dtype = ("BF16", torch.bfloat16) if group else ("AMXINT8", torch.float32)
    assert_loads(tmp_path, values(made), backend, dtype)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("group", [0, 32])
def test_int8_that_is_not_packed(tmp_path: Path, group: int, zeros: bool) -> None:
    """int-quantized: codes from -128 to 127, with zero points of the same kind."""
    made = all_random(8, group, zeros=zeros, dtype=torch.float32)
    tensors = {}
    for key, one in made.items():
        tensors[key] = {
            ".weight": torch.from_numpy(one.codes - 128).to(torch.int8),
            ".weight_scale": one.scale,
            ".weight_zero_point": torch.from_numpy(one.zero - 128).to(torch.int8),
        }
    save(tmp_path, tensors, packed(8, group, symmetric=not zeros))
    with open_checkpoint(tmp_path) as checkpoint:
        for e in range(E):
            for part, matrix in checkpoint.layer(3).expert(e, SIZES).matrices.items():
                want = made[part, e].values.astype(np.float32)
                # A product of two f32, rounded once.
                np.testing.assert_array_equal(matrix.data, want)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    assert moe.backend.name == ("BF16" if zeros or group else "AMXINT8")


# Of rows, all of them, and all of them in other words.
WHOLE: list[tuple[int, ...]] = [(160, 1), (160,), (1,), (1, 1), ()]


@pytest.mark.parametrize("scale", WHOLE, ids=str)
@pytest.mark.parametrize("zero", WHOLE, ids=str)
def test_zero_points_of_int8_may_be_for_other_rows_than_scales(
    scale: tuple[int, ...], zero: tuple[int, ...]
) -> None:
    n, k = 160, 32
    codes = torch.arange(n * k).reshape(n, k).to(torch.int8)
    scales = torch.linspace(0.25, 2, n)[: math.prod(scale)]
    zeros = torch.arange(1, n + 1)[: math.prod(zero)].to(torch.int8)
    made = {"weight": codes, "weight_scale": scales.reshape(scale)}
    made["weight_zero_point"] = zeros.reshape(zero)
    found = read_tensors(made, n, k, Quantization())
    want = (codes.double() - zeros.double().reshape(-1, 1)) * scales.double().reshape(-1, 1)
    assert torch.equal(found.data, want.float())


def test_int8_with_zero_points_for_groups_that_scales_have_not() -> None:
    codes = {"data": torch.ones(4, 32, dtype=torch.int8)}
    layout = Layout(4, 32, 0, Quantization())
    for scale, zero, message in (
        ((4, 1), (4, 2), "has 1 scales and 2 zero points in a row"),
        ((4, 4), (4, 2), "has 4 scales and 2 zero points in a row"),
        ((3, 1), (4, 1), "has scales or zero points for 3 rows, and 4 rows"),
        ((4, 1), (8,), "has scales or zero points for 8 rows, and 4 rows"),
    ):
        made = {**codes, "scale": torch.ones(scale), "zero": torch.ones(zero)}
        with pytest.raises(StorageError, match=f"^{message}$"):
            int8(made, layout)
    made = {**codes, "scale": torch.ones(4, 2), "zero": torch.ones(1)}
    assert not int8(made, replace(layout, group=16)).data.any()


def test_other_widths_are_refused_by_name(tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}mlp.experts.{e}.{part}_proj.{name}": tensor
        for part, (n, k) in SIZES.items()
        for e in range(E)
        for name, tensor in {
            "qweight": torch.zeros(k // 2, n, dtype=torch.int32),
            "scales": torch.ones(k // 32, n, dtype=torch.float16),
        }.items()
    }
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": config(16, 32)})
    )
    save_file(tensors, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match="integers of 16 bits; ktk reads those of 2"):
            layer.expert(0)
