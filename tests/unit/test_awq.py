"""AWQ in the packings of AutoAWQ's three kernels, written here code by code as these read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import assert_loads, assert_means, save
from schemes import CONFIG, SIZES, E, Tensors

from ktk import Format
from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError

RNG = np.random.default_rng(3)
# gemv_fast has no columns to spare.
WIDE = {"gate": (128, 256), "up": (128, 256), "down": (256, 128)}


def random(size: tuple[int, int], group: int, *, symmetric: bool) -> tuple[Any, Any, Any]:
    """Codes [n, k], zero points and scales [n, groups]."""
    n, k = size
    groups = -(-k // group)
    zero = np.full((n, groups), 8) if symmetric else RNG.integers(0, 16, (n, groups))
    scale = RNG.uniform(0.001, 0.01, (n, groups)).astype(np.float16)
    return RNG.integers(0, 16, (n, k)), zero, scale


def values(codes: Any, zero: Any, scale: Any, group: int) -> np.ndarray:
    k = codes.shape[1]
    spread = [one.repeat(group, 1)[:, :k].astype(np.float64) for one in (zero, scale)]
    return np.asarray((codes - spread[0]) * spread[1])


def in_words(codes: np.ndarray) -> torch.Tensor:
    """Eight codes to a word, in order, the lowest bits first."""
    n, k = codes.shape
    words = np.zeros((n, k // 8), np.uint32)
    for i in range(k):
        words[:, i // 8] |= codes[:, i].astype(np.uint32) << np.uint32(4 * (i % 8))
    return torch.from_numpy(words.view(np.int32))


def spare_words(k: int, group: int) -> int:
    """Words of zero points in a row: more where groups are small."""
    multiple = {32: 4, 64: 2}.get(group, 1)
    words = -(-(k // group) // 8)
    return -(-words // multiple) * multiple


def padded(groups: np.ndarray, k: int, group: int) -> np.ndarray:
    wide = np.zeros((len(groups), 8 * spare_words(k, group)), groups.dtype)
    wide[:, : groups.shape[1]] = groups
    return wide


def gemv(codes: Any, zero: Any, scale: Any, group: int) -> Tensors:
    k = codes.shape[1]
    return {
        ".qweight": in_words(codes),
        ".qzeros": in_words(padded(zero, k, group)),
        ".scales": torch.from_numpy(padded(scale, k, group)),
    }


def gemv_fast(codes: Any, zero: Any, scale: Any, group: int) -> Tensors:
    n, k = codes.shape
    words = np.zeros((n // 4, k), np.uint16)
    for row in range(n):
        for column in range(k):
            # 64 words for 64 columns of four rows; eight words for 32 columns of a row.
            run, within = divmod(column, 64)
            half, column_of_half = divmod(within, 32)
            place, word = divmod(column_of_half, 8)
            at = 64 * run + 16 * (row % 4) + 8 * half + word
            words[row // 4, at] |= np.uint16(codes[row, column] << 4 * place)
    product = -(scale.astype(np.float32) * zero.astype(np.float32)).astype(np.float16)
    return {
        ".qweight": torch.from_numpy(words.view(np.int16)),
        ".qzeros": torch.from_numpy(padded(product, k, group).T.copy()),
        ".scales": torch.from_numpy(padded(scale, k, group).T.copy()),
    }


def config(group: int, **more: Any) -> dict[str, Any]:
    entries = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True}
    return {**entries, **more}


def write(
    folder: Path, make: Any, sizes: dict[str, tuple[int, int]], group: int, **entries: Any
) -> dict[tuple[str, int], np.ndarray]:
    made, meant = {}, {}
    for part, size in sizes.items():
        for e in range(E):
            one = random(size, group, symmetric=entries.get("zero_point") is False)
            made[part, e], meant[part, e] = make(*one, group), values(*one, group)
    save(folder, made, config(group, **{"version": make.__name__, **entries}))
    inner, hidden = sizes["gate"]
    path = folder / "config.json"
    entries = {**json.loads(path.read_text()), "hidden_size": hidden}
    path.write_text(json.dumps({**entries, "moe_intermediate_size": inner}))
    return meant


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("make", [gemv, gemv_fast], ids=lambda make: make.__name__)
def test_packings_for_products_with_a_vector(tmp_path: Path, make: Any, group: int) -> None:
    meant = write(tmp_path, make, WIDE, group)
    assert_means(tmp_path, meant, Format("u4", "f16", "u8", 1, group))
    assert_loads(tmp_path, meant, "AMXINT4", torch.float32)


@pytest.mark.parametrize("make", [gemv, gemv_fast], ids=lambda make: make.__name__)
def test_without_zero_points(tmp_path: Path, make: Any) -> None:
    meant = write(tmp_path, make, WIDE, 32, zero_point=False)
    assert_means(tmp_path, meant, Format("u4", "f16", "none", 1, 32))
    assert_loads(tmp_path, meant, "RAWINT4", torch.float32)


def test_sizes_that_are_no_multiples_of_eight_groups(tmp_path: Path) -> None:
    meant = write(tmp_path, gemv, SIZES, 32)
    assert_means(tmp_path, meant, Format("u4", "f16", "u8", 1, 32))


def test_square_matrices_are_not_taken_for_those_of_gemm(tmp_path: Path) -> None:
    """Words of both packings have the same shape; scales tell."""
    square = dict.fromkeys(SIZES, (128, 128))
    meant = write(tmp_path, gemv, square, 32)
    assert_means(tmp_path, meant, Format("u4", "f16", "u8", 1, 32))


def test_zero_points_that_are_none_are_refused(tmp_path: Path) -> None:
    def gemv_fast_of_others(*one: Any) -> Tensors:
        made = gemv_fast(*one)
        made[".qzeros"] *= 1.125
        return made

    write(tmp_path, gemv_fast_of_others, WIDE, 32, version="gemv_fast")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match="has zero points that are no whole codes"):
            layer.expert(0)


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (-1, "-1 to 15"),
        (16, "0 to 16"),
        (300, "0 to 300"),
        (np.inf, "has zero points .* expected codes of 0 to 15"),
    ],
)
def test_zero_points_that_are_no_codes_are_refused(
    tmp_path: Path, zero: float, message: str
) -> None:
    def made(codes: Any, points: Any, scale: Any, group: int) -> Tensors:
        points = points.astype(np.float32)
        points[:, :3] = 0, 15, zero
        return gemv_fast(codes, points, scale, group)

    write(tmp_path, made, WIDE, 32, version="gemv_fast")
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match=rf"qweight in .* {message}"):
            layer.expert(0)


@pytest.mark.parametrize("packing", ["marlin", "bitblas", "llm-awq"])
def test_other_packings_are_refused_by_name(tmp_path: Path, packing: str) -> None:
    write(tmp_path, gemv, WIDE, 32, version=packing)
    wanted = (
        rf"0\.gate_proj\.qweight in .* is packed as {packing}, as config\.json says, which ktk "
        "does not read: take a checkpoint that is packed as gptq or gemm"
    )
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=wanted):
        checkpoint.layer(3)


def test_the_planar_packing_of_gptqmodel_is_refused(tmp_path: Path) -> None:
    """Its tensors have the names and shapes of GPTQ's."""
    made = {
        (part, e): {
            ".qweight": torch.zeros(k // 8, n, dtype=torch.int32),
            ".scales": torch.ones(k // 32, n, dtype=torch.float16),
        }
        for part, (n, k) in SIZES.items()
        for e in range(E)
    }
    entries = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
    save(tmp_path, made, {**entries, "checkpoint_format": "gptq_p"})
    wanted = "is packed as gptq_p"
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=wanted):
        checkpoint.layer(3)
    save(tmp_path, made, {**entries, "checkpoint_format": "gptq"})
    with open_checkpoint(tmp_path) as checkpoint:
        assert checkpoint.layer(3).config.hidden_size == CONFIG["hidden_size"]


def test_eight_bits_are_refused_by_name(tmp_path: Path) -> None:
    made = {
        (part, e): {
            ".qweight": torch.zeros(k, n // 4, dtype=torch.int32),
            ".qzeros": torch.zeros(k // 32, n // 4, dtype=torch.int32),
            ".scales": torch.ones(k // 32, n, dtype=torch.float16),
        }
        for part, (n, k) in SIZES.items()
        for e in range(E)
    }
    save(tmp_path, made, config(32, version="gemm", bits=8))
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        with pytest.raises(CheckpointError, match="is AWQ of 8 bits; ktk reads AWQ of 4"):
            layer.expert(0)
