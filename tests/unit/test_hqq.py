"""HQQ's files mean (code - zero) * scale, in groups along either axis, whatever the packing.

They are written here by the description of the format, and by hqq's own packing where it is there.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import F32, assert_loads, assert_means, save
from schemes import NAMES, SIZES, E
from written import HQQ, PACKINGS, hqq, letters, packed

import ktk
from ktk import Format
from ktk.checkpoint import open_checkpoint
from ktk.conversion import convert
from ktk.errors import CheckpointError

RNG = np.random.default_rng(5)
# Whose rows groups of 64 and 128 divide.
WIDE = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}
KEPT = {"f16": torch.float16, "bf16": torch.bfloat16}


def all_of(*options: Any, sizes: dict[str, tuple[int, int]] = SIZES) -> tuple[Any, Any]:
    made, values = {}, {}
    for part, size in sizes.items():
        for e in range(E):
            made[part, e], values[part, e] = hqq(size, *options)
    return made, values


def save_wide(folder: Path, made: Any) -> None:
    save(folder, made, HQQ)
    path = folder / "config.json"
    inner, hidden = WIDE["gate"]
    entries = {"hidden_size": hidden, "moe_intermediate_size": inner}
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def in_f32(values: Any) -> Any:
    return {key: one.astype(np.float32) for key, one in values.items()}


# --- codes that are kept ------------------------------------------------------------------------


@pytest.mark.parametrize("element", KEPT)
@pytest.mark.parametrize("bits", [bits for bits in PACKINGS if bits <= 4])
def test_codes_are_kept_with_their_scales_and_zero_points(
    tmp_path: Path, bits: int, element: str
) -> None:
    made, values = all_of(bits, 1, 32, KEPT[element])
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, Format("u4", element, element, 1, 32))
    assert_loads(tmp_path, values, "AMXINT4", torch.float32)


@pytest.mark.parametrize("element", KEPT)
@pytest.mark.parametrize("group", [64, 128])
def test_usual_groups(tmp_path: Path, group: int, element: str) -> None:
    made, values = all_of(4, 1, group, KEPT[element], sizes=WIDE)
    save_wide(tmp_path, made)
    assert_means(tmp_path, values, Format("u4", element, element, 1, group))
    assert_loads(tmp_path, values, "AMXINT4", torch.float32)


def test_groups_of_whole_rows(tmp_path: Path) -> None:
    """Two kinds of rows have one format, and groups of 128 have the scales of the row."""
    made, values = all_of(4, 1, None, torch.float16)
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, Format("u4", "f16", "f16", 1, 0))
    assert_loads(tmp_path, values, "AMXINT4", torch.float32)


@pytest.mark.parametrize("element", KEPT)
def test_f32_that_lost_nothing_by_being_f32_is_kept(tmp_path: Path, element: str) -> None:
    made, values = all_of(4, 1, 32, KEPT[element])
    for tensors in made.values():
        tensors[".scale"] = tensors[".scale"].float()
        tensors[".zero"] = tensors[".zero"].float()
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, Format("u4", element, element, 1, 32))
    assert_loads(tmp_path, values, "AMXINT4", torch.float32)


def test_one_f32_that_is_more_precise_lets_all_be_decoded(tmp_path: Path) -> None:
    made, values = all_of(4, 1, 32, torch.float16)
    one, group = made["down", 1], values["down", 1].reshape(-1, 32)[3]
    zero = one[".zero"].float()
    moved = 2.0**-14  # a zero point beyond 0.25 has no such bit in f16
    zero[3] += moved
    group -= moved * one[".scale"][3].double().numpy()
    one[".zero"] = zero
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, in_f32(values), F32)


def test_words_may_be_called_floats(tmp_path: Path) -> None:
    """view_as_float: the bytes of codes as elements of the type that is computed with."""
    made, values = all_of(4, 1, 32, torch.bfloat16)
    for tensors in made.values():
        tensors[".W_q"] = tensors[".W_q"].view(torch.bfloat16)
        tensors[".view_as_float"] += 1
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, Format("u4", "bf16", "bf16", 1, 32))


def test_matrices_of_fewer_bits_are_kept_beside_others(tmp_path: Path) -> None:
    made, values = all_of(4, 1, 32, torch.float16)
    for e in range(E):
        made["down", e], values["down", e] = hqq(SIZES["down"], 2, 1, 32, torch.float16)
    save(tmp_path, made, HQQ)
    assert_loads(tmp_path, values, "AMXINT4", torch.float32)


def test_kept_codes_are_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made, values = all_of(4, 1, 32, torch.float16)
    save(tmp_path, made, HQQ)
    caplog.set_level(logging.INFO, "ktk")
    model = ktk.Model.from_checkpoint(tmp_path)
    stored = "u4 with f16 scales and f16 zero points per 1 x 32"
    assert f"layers 3: stored as they are; {stored}" in caplog.text
    for part, got in zip(SIZES, model[3].unpack_expert(1), strict=True):
        np.testing.assert_array_equal(got, values[part, 1].astype(np.float32))


def test_kept_codes_go_through_a_conversion(tmp_path: Path) -> None:
    made, values = all_of(4, 1, 32, torch.float16)
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    save(source, made, HQQ)
    convert(source, target, backend="AMXINT4")
    assert_loads(target, values, "AMXINT4", torch.float32)


def test_zero_points_count_in_products(tmp_path: Path) -> None:
    """A layer's output is that of its values, to what int8 activations leave.

    An expert is two products in a row. Activations are rounded to 127 levels of the largest of
    128: relative to it, 1 / 254 at most.
    """
    made, values = all_of(4, 1, 64, torch.float16, sizes=WIDE)
    save_wide(tmp_path, made)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    rng = np.random.default_rng(7)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    got = moe(torch.from_numpy(x), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1))
    gate, up, down = (values[part, 0] for part in ("gate", "up", "down"))
    g, u = x @ gate.T, x @ up.T
    inner = g / (1 + np.exp(-g)) * u
    step = np.abs(x).reshape(3, 2, 128).max(-1).repeat(128, -1) / 254
    dg, du = step @ np.abs(gate).T, step @ np.abs(up).T
    # silu's slope is 1.1 at most, and silu(g) is at most |g|.
    change = 1.1 * dg * np.abs(u) + (np.abs(g) + 1.1 * dg) * du
    most = (np.abs(inner) + change).max(-1, keepdims=True) / 254
    bound = (change + most) @ np.abs(down).T
    error = np.abs(got.double().numpy() - inner @ down.T)
    # f32 sums and the output add little: 2**-16 of all magnitudes covers a depth of 256.
    assert (error <= bound + 2.0**-16 * (np.abs(inner) @ np.abs(down).T)).all()


# --- codes that are decoded ---------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "axis"), [*((bits, 0) for bits in PACKINGS), (8, 1)])
def test_what_no_format_holds_is_decoded(tmp_path: Path, bits: int, axis: int) -> None:
    made, values = all_of(bits, axis, 64, torch.float16)
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, in_f32(values), F32)
    assert_loads(tmp_path, values, "BF16", torch.bfloat16)


def test_columns_as_groups(tmp_path: Path) -> None:
    made, values = all_of(3, 0, None, torch.float16)
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, in_f32(values), F32)


def test_f32_is_not_rounded_to_keep_codes(tmp_path: Path) -> None:
    """Values are decoded in f32: a difference and a product, each rounded once."""
    made, values = all_of(4, 1, 32, torch.float32)
    save(tmp_path, made, HQQ)
    with open_checkpoint(tmp_path) as checkpoint:
        for part, matrix in checkpoint.layer(3).values(0).matrices.items():
            exact = values[part, 0]
            error = np.abs(matrix.data.numpy() - exact)
            assert (error <= ((1 + 2.0**-24) ** 2 - 1) * np.abs(exact)).all()


def mixed() -> Any:
    made, _ = all_of(4, 1, 32, torch.float16)
    made["gate", 1], _ = hqq(SIZES["gate"], 4, 1, 64, torch.float16)
    return made


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (all_of(4, 0, 64, torch.float16)[0], "hqq, whose groups run down columns"),
        (all_of(8, 1, 32, torch.float16)[0], "hqq, whose codes have more than 4 bits"),
        (all_of(4, 1, 64, torch.float16)[0], "hqq, whose groups do not divide rows"),
        (
            all_of(4, 1, 32, torch.float32)[0],
            "hqq, whose scales or zero points are exact in neither bf16 nor f16",
        ),
        (mixed(), "hqq, whose matrices differ: u4-f16-zero-f16-g32 and u4-f16-zero-f16-g64"),
        # No backend has such groups.
        (
            all_of(4, 1, 16, torch.float16)[0],
            "u4 with f16 scales and f16 zero points per 1 x 16",
        ),
    ],
    ids=["axis 0", "8 bits", "groups of two rows", "f32", "mixed", "groups of 16"],
)
def test_it_is_decoded_and_a_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, made: Any, why: str
) -> None:
    """What quantises again is a warning."""
    save(tmp_path, made, HQQ)
    caplog.set_level(logging.INFO, "ktk")
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    assert moe.backend.name == "BF16"
    assert f"layers 3: decoded to f32 and rounded; bf16 (from {why})" in caplog.text
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    ktk.MoE.from_checkpoint(tmp_path, 3, "AMXINT8")
    [warning] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "decoded to f32 and quantised by AMXINT8" in warning.getMessage()


# --- damage -------------------------------------------------------------------------------------


def refusal(folder: Path, made: Any) -> str:
    save(folder, made, HQQ)
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.layer(3).expert(1)
    message = str(caught.value)
    assert message.startswith(f"tensor {NAMES['up'].format(e=1)}.W_q in {folder}")
    return message


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (".packing", letters("5bit_u8"), "is packed as '5bit_u8'; ktk reads 8bit_u8, 4bit_u8"),
        (".shape", torch.tensor([1, 2]), "is a matrix of [1, 2], but config.json means [160, 192]"),
        (".scale", torch.ones(7, 1).half(), "has scale of shape [7, 1], not by group"),
        (".zero", torch.ones(1, 960).half(), "has zero of shape [1, 960], not by group"),
        (".W_q", torch.zeros(6, 32).byte(), "has 384 codes in groups of"),
        (".W_q", torch.zeros(6, 31).byte(), "has rows that are no whole words of 3bit_32"),
        (".packing", letters("2bit_u8"), "has 61440 codes in groups of"),
        (".packing", letters("8bit_u8"), "has 15360 codes in groups of"),
        (".group_size", torch.tensor(0).int(), "in groups of 0, and is a matrix of [160, 192]"),
        (".group_size", torch.tensor(48).int(), "in groups of 48, and is a matrix of [160, 192]"),
        (".nbits", torch.tensor(8).int(), "has codes of 8 bits, but is packed as 4bit_u8"),
        (".axis", torch.tensor(0).int(), "codes in groups of"),
        (".axis", torch.tensor(2).int(), "has groups along axis 2, expected 0 or 1"),
    ],
)
def test_what_contradicts_itself_is_named(
    tmp_path: Path, name: str, value: torch.Tensor, wanted: str, group: int
) -> None:
    """Whether the others would be kept (groups of 32) or decoded (of 64)."""
    made, _ = all_of(4, 1, group, torch.float16)
    if "whole words" in wanted:
        made["up", 1][".packing"] = letters("3bit_32")
    made["up", 1][name] = value
    assert wanted in refusal(tmp_path, made)


def test_a_missing_zero_point_is_named(tmp_path: Path) -> None:
    made, _ = all_of(4, 1, 32, torch.float16)
    del made["up", 1][".zero"]
    assert f"needs {NAMES['up'].format(e=1)}.zero, which is missing" in refusal(tmp_path, made)


def test_zero_points_that_are_missing_everywhere_are_noticed(tmp_path: Path) -> None:
    made, _ = all_of(4, 1, 32, torch.float16)
    for tensors in made.values():
        del tensors[".zero"]
    save(tmp_path, made, HQQ)
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(CheckpointError, match="ktk knows no scheme that it is part of; beside it"),
    ):
        checkpoint.layer(3)


def test_zero_points_in_codes_are_refused_with_a_cure(tmp_path: Path) -> None:
    made, _ = all_of(4, 1, 64, torch.float16)
    for tensors in made.values():
        tensors[".zero_q"] = tensors.pop(".zero").byte()
    save(tmp_path, made, HQQ)
    wanted = "HQQ's zero points are quantised themselves: save the model with quant_zero=False"
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=wanted):
        checkpoint.layer(3)


@pytest.mark.parametrize("bits", PACKINGS)
def test_the_packing_of_hqq_itself(bits: int) -> None:
    bitpack = pytest.importorskip("hqq.core.bitpack", reason="needs hqq").BitPack
    codes = RNG.integers(0, 1 << bits, (120, 8))
    pack = getattr(bitpack, f"pack_{PACKINGS[bits][0]}")
    assert torch.equal(pack(torch.from_numpy(codes)), packed(codes, bits))
