"""HQQ's files mean (code - zero) * scale, in groups along either axis, whatever the packing.

They are written here by the description of the format, and by hqq's own packing where it is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import F32, assert_loads, assert_means, save
from schemes import NAMES, SIZES, E, Tensors

from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError

CONFIG = {"quant_method": "hqq", "quant_config": {"weight_quant_params": {}}}
RNG = np.random.default_rng(5)
#: By bits: the packing, codes of a word, and the word.
PACKINGS = {
    8: ("8bit_u8", 1, np.uint8),
    4: ("4bit_u8", 2, np.uint8),
    3: ("3bit_32", 10, np.int32),
    2: ("2bit_u8", 4, np.uint8),
    1: ("1bit_u8", 8, np.uint8),
}


def letters(text: str) -> torch.Tensor:
    return torch.tensor([ord(letter) for letter in text], dtype=torch.uint8)


def packed(codes: np.ndarray, bits: int) -> torch.Tensor:
    """Rows that are R / codes_of_word apart share words, the first in the highest bits."""
    _, count, word = PACKINGS[bits]
    rows = -(-len(codes) // count)
    words = np.zeros((rows, codes.shape[1]), np.int64)
    for row, one in enumerate(codes):
        place, at = divmod(row, rows)
        words[at] |= one.astype(np.int64) << bits * (count - 1 - place)
    return torch.from_numpy(words.astype(word))


def matrix(
    size: tuple[int, int], bits: int, axis: int, group: int, dtype: torch.dtype
) -> tuple[Tensors, np.ndarray]:
    """A random matrix and its values, in f32."""
    n, k = size
    shape = (group, n * k // group) if axis == 0 else (n * k // group, group)
    codes = RNG.integers(0, 1 << bits, shape)
    by_group = (1, shape[1]) if axis == 0 else (shape[0], 1)
    scale = torch.from_numpy(RNG.uniform(0.001, 0.01, by_group)).to(dtype)
    zero = torch.from_numpy(RNG.uniform(0, (1 << bits) - 1, by_group)).to(dtype)
    made = {
        ".W_q": packed(codes, bits),
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(size),
        ".packing": letters(PACKINGS[bits][0]),
        ".axis": torch.tensor(axis, dtype=torch.int32),
        ".group_size": torch.tensor(group, dtype=torch.int32),
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".compute_dtype": letters(str(dtype)),
        ".unpack_view_dtype": letters("torch.uint8"),
        **{
            f".{name}": torch.tensor(0, dtype=torch.uint8)
            for name in (
                *("view_as_float", "channel_wise", "optimize", "round_zero", "quant_scale"),
                *("quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config"),
            )
        },
    }
    steps = codes.astype(np.float32) - zero.float().numpy()
    return made, (steps * scale.float().numpy()).reshape(size)


def all_of(*options: Any) -> tuple[Any, Any]:
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            made[part, e], values[part, e] = matrix(size, *options)
    return made, values


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("bits", PACKINGS)
def test_all_widths(tmp_path: Path, bits: int, axis: int) -> None:
    made, values = all_of(bits, axis, 64, torch.float16)
    save(tmp_path, made, CONFIG)
    assert_means(tmp_path, values, F32)
    assert_loads(tmp_path, values, "BF16", torch.bfloat16)


def test_words_may_be_called_floats(tmp_path: Path) -> None:
    """view_as_float: the bytes of codes as elements of the type that is computed with."""
    made, values = all_of(4, 1, 64, torch.bfloat16)
    for tensors in made.values():
        tensors[".W_q"] = tensors[".W_q"].view(torch.bfloat16)
        tensors[".view_as_float"] += 1
    save(tmp_path, made, CONFIG)
    assert_means(tmp_path, values, F32)


def refusal(folder: Path, made: Any) -> str:
    save(folder, made, CONFIG)
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
    save(tmp_path, made, CONFIG)
    wanted = "HQQ's zero points are quantised themselves: save the model with quant_zero=False"
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=wanted):
        checkpoint.layer(3)


@pytest.mark.parametrize("bits", PACKINGS)
def test_the_packing_of_hqq_itself(bits: int) -> None:
    bitpack = pytest.importorskip("hqq.core.bitpack", reason="needs hqq").BitPack
    codes = RNG.integers(0, 1 << bits, (120, 8))
    pack = getattr(bitpack, f"pack_{PACKINGS[bits][0]}")
    assert torch.equal(pack(torch.from_numpy(codes)), packed(codes, bits))
