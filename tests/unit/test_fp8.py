"""FP8 of both kinds, with scales of any extent, means what codes and scales multiply to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import assert_loads, assert_means
from schemes import FP8_CONFIG, NAMES, PREFIX, SIZES, E, Tensors, ct, write

from ktk import Format

KINDS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
Codes = dict[tuple[str, int], torch.Tensor]


def random_codes(kind: str) -> Codes:
    """Every code but NaN and infinity."""
    generator = torch.Generator().manual_seed(len(kind))
    dtype = KINDS[kind]
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every[every.float().isfinite()].view(torch.uint8)
    return {
        (part, e): finite[torch.randint(len(finite), size, generator=generator)].view(dtype)
        for part, size in SIZES.items()
        for e in range(E)
    }


def groups(size: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-size[0] // (block[0] or size[0])), -(-size[1] // (block[1] or size[1]))


def spread(scale: torch.Tensor, size: tuple[int, int], block: tuple[int, int]) -> np.ndarray:
    """Repeat the scale of each block for its elements."""
    n, k = size
    rows, columns = block[0] or n, block[1] or k
    wide = scale.double().numpy().reshape(groups(size, block))
    return wide.repeat(rows, 0)[:n].repeat(columns, 1)[:, :k]


def made(
    codes: Codes, block: tuple[int, int], scale_of: Any
) -> tuple[dict[tuple[str, int], torch.Tensor], dict[tuple[str, int], np.ndarray]]:
    """Return random scales, and the values that they make of codes."""
    generator = torch.Generator().manual_seed(7)
    scales, values = {}, {}
    for (part, e), data in codes.items():
        size = SIZES[part]
        scales[part, e] = scale_of(torch.rand(groups(size, block), generator=generator))
        values[part, e] = data.double().numpy() * spread(scales[part, e], size, block)
    return scales, values


def powers(random: torch.Tensor) -> torch.Tensor:
    """UE8M0: the power of two is the code, less 127."""
    return (random * 40 + 107).to(torch.uint8).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("name", ["weight_scale_inv", "scale"])
@pytest.mark.parametrize("stored", ["F8_E8M0", "U8"])
def test_powers_of_two_by_32_x_32_are_kept(tmp_path: Path, name: str, stored: str) -> None:
    """DeepSeek-V4.1: MXFP8, with the same scales in 32 rows."""
    codes = random_codes("e4m3")
    scales, values = made(codes, (32, 32), powers)
    tensors: Tensors = {}
    for (part, e), data in codes.items():
        scale = scales[part, e]
        tensors[f"{NAMES[part].format(e=e)}.weight"] = data
        tensors[f"{NAMES[part].format(e=e)}.{name}"] = (
            scale if stored == "F8_E8M0" else scale.view(torch.uint8)
        )
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    assert_means(tmp_path, values, Format("e4m3", "ue8m0", "none", 1, 32))
    assert_loads(tmp_path, values, "FP8", torch.float32)


@pytest.mark.parametrize("block", [(32, 32), (64, 96), (16, 48)])
def test_powers_of_two_of_other_blocks(tmp_path: Path, block: tuple[int, int]) -> None:
    codes = random_codes("e4m3")
    scales, values = made(codes, block, powers)
    tensors = {f"{NAMES[part].format(e=e)}.weight": data for (part, e), data in codes.items()}
    tensors |= {
        f"{NAMES[part].format(e=e)}.weight_scale_inv": scale for (part, e), scale in scales.items()
    }
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": list(block)})
    kept = block[1] % 32 == 0
    fmt = Format("e4m3", "ue8m0", "none", 1, 32) if kept else Format("e4m3", "f32", "none", *block)
    assert_means(tmp_path, values, fmt)
    assert_loads(tmp_path, values, *(("FP8", torch.float32) if kept else ("BF16", torch.bfloat16)))


def test_powers_of_two_that_experts_share_a_tensor_of(tmp_path: Path) -> None:
    """Gate above up, 160 rows each: blocks of 32 rows belong to one of them."""
    codes = random_codes("e4m3")
    scales, values = made(codes, (32, 32), powers)
    tensors: Tensors = {}
    for suffix, arrays in (("", codes), ("_scale_inv", scales)):
        gate, up, down = (
            torch.stack([arrays[part, e].view(torch.uint8) for e in range(E)]) for part in SIZES
        )
        kind = torch.float8_e4m3fn if suffix == "" else torch.uint8
        tensors[f"{PREFIX}mlp.experts.gate_up_proj{suffix}"] = torch.cat([gate, up], 1).view(kind)
        tensors[f"{PREFIX}mlp.experts.down_proj{suffix}"] = down.view(kind)
    write(tmp_path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    assert_means(tmp_path, values, Format("e4m3", "ue8m0", "none", 1, 32))
    assert_loads(tmp_path, values, "FP8", torch.float32)


def as_it_is(random: torch.Tensor) -> torch.Tensor:
    return random + 0.5


@pytest.mark.parametrize(
    ("block", "name", "config"),
    [
        ((128, 128), "weight_scale_inv", FP8_CONFIG),
        ((1, 0), "weight_scale", ct(num_bits=8, type="float", strategy="channel")),
        ((0, 0), "weight_scale", ct(num_bits=8, type="float", strategy="tensor")),
    ],
)
def test_e5m2_is_decoded(
    tmp_path: Path, block: tuple[int, int], name: str, config: dict[str, Any]
) -> None:
    codes = random_codes("e5m2")
    scales, values = made(codes, block, as_it_is)
    tensors = {f"{NAMES[part].format(e=e)}.weight": data for (part, e), data in codes.items()}
    tensors |= {f"{NAMES[part].format(e=e)}.{name}": scale for (part, e), scale in scales.items()}
    write(tmp_path, tensors, config)
    assert_means(tmp_path, values, Format("e5m2", "f32", "none", *(block if block[0] else (1, 0))))
    # Products of two f32 are rounded to bf16 by way of f32.
    once = {key: one.astype(np.float32).astype(np.float64) for key, one in values.items()}
    assert_loads(tmp_path, once, "BF16", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("weight_scale", "input_scale"),
        ("weight_scale_inv", "activation_scale"),
        ("qscale_weight", "qscale_act"),
    ],
    ids=["ModelOpt and compressed-tensors", "transformers", "Mistral"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_scale_for_a_whole_matrix(
    tmp_path: Path, name: str, activation: str, dtype: torch.dtype
) -> None:
    codes = random_codes("e4m3")
    scales, values = made(codes, (0, 0), lambda random: as_it_is(random).to(dtype))
    tensors: Tensors = {}
    for (part, e), data in codes.items():
        stem = NAMES[part].format(e=e)
        tensors |= {
            f"{stem}.weight": data,
            f"{stem}.{name}": scales[part, e].reshape(()),
            f"{stem}.{activation}": torch.ones(()),
        }
    entries = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    write(tmp_path, tensors, entries)
    assert_means(tmp_path, values, Format("e4m3", "f32", "none", 1, 0))
    once = {key: one.astype(np.float32).astype(np.float64) for key, one in values.items()}
    assert_loads(tmp_path, once, "FP8", torch.float32)
