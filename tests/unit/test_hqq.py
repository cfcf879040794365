"""HQQ's files mean (code - zero) * scale, in groups along either axis, whatever the packing.

They are written here by the description of the format, and by hqq's own packing where it is there.
"""

from __future__ import annotations

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
from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError

RNG = np.random.default_rng(5)


def all_of(*options: Any) -> tuple[Any, Any]:
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            made[part, e], values[part, e] = hqq(size, *options)
    return made, values


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", PACKINGS)
def test_all_widths(tmp_path: Path, bits: int, axis: int) -> None:
    made, values = all_of(bits, axis, 64, torch.float16)
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, F32)
    assert_loads(tmp_path, values, "BF16", torch.bfloat16)


def test_it_is_decoded_and_a_line_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No backend keeps zero points that are no codes; one that quantises again is a warning."""
    made, values = all_of(4, 1, 64, torch.float16)
    save(tmp_path, made, HQQ)
    caplog.set_level(logging.INFO, "ktk")
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    assert moe.backend.name == "BF16"
    assert "layers 3: decoded to f32 and rounded; bf16" in caplog.text
    for part, got in zip(("gate", "up", "down"), moe.unpack_expert(1), strict=True):
        exact = torch.from_numpy(np.asarray(values[part, 1])).to(torch.bfloat16).float()
        assert torch.equal(torch.from_numpy(np.asarray(got)).float(), exact)
    assert not [one for one in caplog.records if one.levelno >= logging.WARNING]
    ktk.MoE.from_checkpoint(tmp_path, 3, "AMXINT8")
    [warning] = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert "decoded to f32 and quantised by AMXINT8" in warning.getMessage()


def test_words_may_be_called_floats(tmp_path: Path) -> None:
    """view_as_float: the bytes of codes as elements of the type that is computed with."""
    made, values = all_of(4, 1, 64, torch.bfloat16)
    for tensors in made.values():
        tensors[".W_q"] = tensors[".W_q"].view(torch.bfloat16)
        tensors[".view_as_float"] += 1
    save(tmp_path, made, HQQ)
    assert_means(tmp_path, values, F32)


def refusal(folder: Path, made: Any) -> str:
    save(folder, made, HQQ)
    with pytest.raises(CheckpointError) as caught, open_checkpoint(folder) as checkpoint:
        checkpoint.layer(3).expert(1)
    message = str(caught.value)
    assert message.startswith(f"tensor {NAMES['up'].format(e=1)}.W_q in {folder}")
    return message


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        (".packing", letters("5bit_u8"), "is packed as '5bit_u8'; ktk reads 8bit_u8, 4bit_u8"),
        (".shape", torch.tensor([1, 2]), "is a matrix of [1, 2], but config.json means [160, 192]"),
        (".scale", torch.ones(7, 1).half(), "has scale of shape [7, 1], not by group"),
        (".W_q", torch.zeros(3, 64).byte(), "has 384 codes in groups of 64, and is a matrix of"),
        (".packing", letters("3bit_32"), "has rows that are no whole words of 3bit_32"),
        (".group_size", torch.tensor(0).int(), "in groups of 0, and is a matrix of [160, 192]"),
    ],
)
def test_what_contradicts_itself_is_named(
    tmp_path: Path, name: str, value: torch.Tensor, wanted: str
) -> None:
    made, _ = all_of(4, 1, 64, torch.float16)
    if "whole words" in wanted:
        made["up", 1][".W_q"] = torch.zeros(3, 63).byte()
    made["up", 1][name] = value
    assert wanted in refusal(tmp_path, made)


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
