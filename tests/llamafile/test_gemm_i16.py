"""Sums of products that are multiplied as pairs of int16, and those that are too large for that.

Types with an integer per 16 columns and one d per 256 multiply two sums at once where both have 16
bits (backends/llamafile/gemm_i16.h). Rows must not depend on what their neighbours allow.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import ktk
from ktk import Format, _core
from ktk.ggml import block

BACKEND = ktk.load_backend("LLAMAFILE")
VARIANTS = [variant.name for variant in BACKEND.variants if variant.runnable]
N, K, ROWS = 64, 1024, 64
GROUP = 16


def q6_k(codes: np.ndarray, sub: np.ndarray, d: float) -> np.ndarray:
    """Blocks of codes [n, k] in -32...31 and integers [n, k / 16]."""
    n, k = codes.shape
    # [n, block, half, quarter, 32]: quarters share bytes, the first two with the last two.
    q = (codes + 32).astype(np.uint8).reshape(n, k // 256, 2, 4, 32)
    low = q[:, :, :, :2] & 15 | q[:, :, :, 2:] << 4
    high = q[:, :, :, 0] >> 4
    for quarter in range(1, 4):
        high |= q[:, :, :, quarter] >> 4 << 2 * quarter
    parts = (
        low.reshape(n, k // 256, 128),
        high.reshape(n, k // 256, 64),
        sub.astype(np.int8).reshape(n, k // 256, 16).view(np.uint8),
        np.broadcast_to(np.array([d], np.float16).view(np.uint8), (n, k // 256, 2)),
    )
    made = np.concatenate(parts, axis=2).reshape(n, -1)
    wanted = codes * np.repeat(sub, GROUP, 1) * np.float32(np.float16(d))
    np.testing.assert_array_equal(gguf.quants.dequantize(made, Type.Q6_K), wanted)
    return made


def check(codes: np.ndarray, sub: np.ndarray, x: np.ndarray) -> None:
    check_blocks(q6_k(codes, sub, 2.0**-8), "q6_k", x)


def check_blocks(made: np.ndarray, name: str, x: np.ndarray) -> None:
    """Many rows have the bits of one row, which are near the exact product."""
    for variant in VARIANTS:
        packed = _core.PackedMatrix(BACKEND.core, variant, made, given=Format(name))
        got = packed.matmul(x)
        act, weight = packed.act_round_trip(x).astype(np.float64), packed.unpack()
        exact = act @ weight.T.astype(np.float64)
        # Sums of a unit are exact. At most three roundings while those of a pair of units add up,
        # one for each pair of a run, one for each run.
        terms = np.abs(act) @ np.abs(weight).T.astype(np.float64)
        roundings = 4 * (x.shape[1] // 64) + x.shape[1] // 256
        assert (np.abs(got - exact) <= 2.0**-24 * (roundings + 4) * terms).all()
        for rows in (1, 3, 17):
            single = [packed.matmul(x[i : i + rows]) for i in range(0, len(x), rows)]
            np.testing.assert_array_equal(np.concatenate(single), got)


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("count", range(1, GROUP + 1))
def test_sums_around_the_limit_of_a_word(count: int, sign: int) -> None:
    """So many products of 32 * 127 in a group: eight fit into 16 bits, nine do not."""
    groups = np.zeros((1, K // GROUP, GROUP), np.int64)
    groups[:, :, :count] = 1
    mask = groups.reshape(1, K)
    sub = np.tile(np.array([[127, -128, 1, -1]]), (N, K // GROUP // 4))
    x = np.repeat(mask * sign, ROWS, 0).astype(np.float32)
    check(np.repeat(mask * -32, N, 0), sub, x)


@pytest.mark.parametrize("seed", range(4))
def test_rows_do_not_depend_on_their_neighbours(seed: int) -> None:
    """Some rows are flat, so that their sums may be large, and some columns too."""
    rng = np.random.default_rng(seed)
    codes = np.clip(np.rint(rng.standard_normal((N, K)) * 12), -32, 31).astype(np.int64)
    codes[rng.random(N) < 0.1] = -32
    sub = rng.integers(-128, 128, (N, K // GROUP))
    x = rng.standard_normal((ROWS, K)).astype(np.float32)
    x[rng.random(ROWS) < 0.2] = 1
    x[:, :256] = 1 if seed % 2 else x[:, :256]
    check(codes, sub, x)


@pytest.mark.parametrize("size", [2.0**-120, 2.0**-90, 2.0**100, 2.0**120])
def test_activations_near_the_ends_of_the_range(size: float) -> None:
    """Sums over a run neither overflow nor lose digits before they meet d."""
    rng = np.random.default_rng(5)
    codes = rng.integers(-8, 9, (N, K))
    sub = rng.integers(-3, 4, (N, K // GROUP))
    x = rng.standard_normal((ROWS, K)).astype(np.float32)
    x[::2] *= np.float32(size)
    check(codes, sub, x)


@pytest.mark.parametrize("name", ["Q3_K", "IQ1_M", "IQ2_XS", "IQ2_S", "IQ2_K"])
def test_other_types_that_sum_runs(name: str) -> None:
    """More runs than are held at once, and values too large for words (IQ2_XS, IQ2_S)."""
    rng = np.random.default_rng(6)
    k = 9 * 256
    _, size = block(name.lower())
    made = rng.integers(0, 256, (N, k // 256, size), dtype=np.uint8)
    d = np.array([2.0**-8], np.float16).view(np.uint8)
    if name == "IQ1_M":  # four bits of d at the top of each of the last four words
        made[:, :, -7::2] = made[:, :, -7::2] & 15 | np.array([0, 0, 0, 0x10], np.uint8)
    elif name == "Q3_K":
        made[:, :, -2:] = d
    else:
        made[:, :, :2] = d
    x = rng.standard_normal((ROWS, k)).astype(np.float32)
    check_blocks(made.reshape(N, -1), name.lower(), x)
