"""BF16Z keeps every bit, in the layout that is drawn, and multiplies as BF16 does."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from patterns import (
    U16,
    any_bits,
    crowded_group,
    gaussian,
    last_lane,
    pack,
    with_exponents,
    zero_block,
)

import ktk
from ktk import _core

BF16, BF16Z = (ktk.load_backend(name) for name in ("BF16", "BF16Z"))
VARIANTS = [variant.name for variant in BF16Z.variants if variant.runnable]
PATCHES_PER_STEP = 4  # what the side area of a block has room for


def lines(size: int) -> int:
    """Round up to cache lines."""
    return -(-size // 64) * 64


def patches(block: U16) -> int:
    """Count the weights of a block whose exponent is not among the 16 most frequent."""
    counts = np.bincount(block.reshape(-1) >> 7 & 255, minlength=256)
    return int(np.sort(counts)[:-16].sum())


def fits(weights: U16) -> bool:
    """Whether every block has room for its patches."""
    room = lines(16 * -(-weights.shape[1] // 32)) // PATCHES_PER_STEP
    return all(patches(weights[n : n + 32]) <= room for n in range(0, len(weights), 32))


def decode(buffer: npt.NDArray[np.uint8], n: int, k: int) -> U16:
    """Read the layout as layout.h draws it."""
    steps, blocks = -(-k // 32), -(-n // 32)
    header, side = lines(32 + 2 * steps), lines(16 * steps)
    block_bytes = header + steps * 1536
    out = np.zeros((blocks * 32, steps * 32), np.uint16)
    for b in range(blocks):
        block = buffer[b * block_bytes :][:block_bytes]
        table = block[:16].astype(np.uint16) << 7
        counts = block[32 : 32 + 2 * steps].view(np.uint16)
        at = blocks * block_bytes + b * side
        patch = buffer[at : at + side].view(np.uint32)
        assert block[20:24].view(np.uint32)[0] == counts.sum()
        for step in range(steps):
            groups = block[header + step * 1536 :][:1536].view(np.uint16).reshape(8, 3, 32)
            x, y, index = groups[:, 0], groups[:, 1], groups[:, 2]
            plain = np.zeros((2, 16, 32), np.uint16)  # tile, pair of k, word
            for line, word in enumerate((x, y, x.byteswap(), y.byteswap())):
                exponent = table[index >> 4 * line & 15]
                plain[line % 2, line // 2 :: 2] = (word & 0x807F) | exponent
            first = counts[:step].sum(dtype=np.int64)
            for entry in patch[first : first + counts[step]]:
                plain.reshape(-1)[entry >> 16] = entry & 0xFFFF
            rows = plain.reshape(2, 16, 16, 2).transpose(0, 2, 1, 3).reshape(32, 32)
            out[b * 32 :][:32, step * 32 :][:, :32] = rows
    return out[:n, :k]


@st.composite
def matrices(draw: st.DrawFn) -> U16:
    """Matrices with few and with many exponents, and single weights that have another one."""
    shape = (draw(st.integers(1, 70)), draw(st.integers(1, 140)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["gaussian", "any bits", "exponents", "zeros"]))
    if kind == "gaussian":
        weights = gaussian(rng, shape)
    elif kind == "any bits":
        weights = any_bits(rng, shape)
    elif kind == "zeros":
        weights = np.zeros(shape, np.uint16)
    else:
        exponents = draw(st.lists(st.integers(0, 255), min_size=1, max_size=18, unique=True))
        weights = with_exponents(rng, shape, exponents)
    for _ in range(draw(st.integers(0, 5))):
        n, k = draw(st.integers(0, shape[0] - 1)), draw(st.integers(0, shape[1] - 1))
        weights[n, k] = draw(st.integers(0, 0xFFFF))
    return weights


@pytest.mark.parametrize("variant", VARIANTS)
@given(weights=matrices())
@example(last_lane())
@example(crowded_group())
@example(zero_block())
@example(np.full((32, 32), 0x7F80, np.uint16))  # infinities alone: what pads them?
@example(np.full((33, 33), 0xFFFF, np.uint16))
@settings(deadline=None)
def test_every_bit_is_kept_in_the_layout_that_is_drawn(variant: str, weights: U16) -> None:
    plain, packed = pack(BF16, variant, weights), pack(BF16Z, variant, weights)
    for part in zip(packed.exported(), plain.exported(), strict=True):
        np.testing.assert_array_equal(*part)
    ours, theirs = packed.unpack(), plain.unpack()
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))
    if fits(weights):
        assert packed.nbytes == BF16Z.core.packed_size(packed.format, *weights.shape)
        np.testing.assert_array_equal(decode(packed.buffer, *weights.shape), weights)
        steps = -(-weights.shape[1] // 32)
        for number, n in enumerate(range(0, len(weights), 32)):
            header = packed.buffer[number * (lines(32 + 2 * steps) + steps * 1536) :]
            assert header[20:24].view(np.uint32)[0] == patches(weights[n : n + 32])
    else:
        assert packed.nbytes == 64 + plain.nbytes
        np.testing.assert_array_equal(packed.buffer[64:], plain.buffer)


@pytest.mark.parametrize("variant", VARIANTS)
@given(weights=matrices(), m=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
@example(last_lane(), 3, 0)
@example(crowded_group(), 1, 0)
@example(crowded_group(), 25, 0)
@example(zero_block(), 13, 1)
@example(np.full((32, 40), 0x7F80, np.uint16), 2, 2)
@settings(deadline=None)
def test_products_are_those_of_bf16(variant: str, weights: U16, m: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    act = rng.standard_normal((m, weights.shape[1]), np.float32)
    with np.errstate(over="ignore"):
        act[rng.integers(m)] *= rng.choice(np.array([0, 1e-38, 1e38, np.inf, np.nan], np.float32))
    plain, packed = pack(BF16, variant, weights), pack(BF16Z, variant, weights)
    ours, theirs = packed.matmul(act), plain.matmul(act)
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["f32", "f16"])
def test_wider_weights_are_rounded_as_bf16_rounds_them(variant: str, kind: str) -> None:
    values = torch.randn(70, 140, generator=torch.Generator().manual_seed(3)) * 0.1
    values[3, 5], values[40, 139], values[69, 0] = float("nan"), 1e-39, -float("inf")
    data = values if kind == "f32" else values.to(torch.float16)
    plain, packed = (_core.PackedMatrix(b.core, variant, data) for b in (BF16, BF16Z))
    assert packed.nbytes < plain.nbytes
    np.testing.assert_array_equal(packed.exported()[0], plain.exported()[0])


def test_a_wrong_patch_shows() -> None:
    """These tests bite: a patch with another weight, or at another place, is another matrix."""
    weights = last_lane()
    packed = pack(BF16Z, VARIANTS[0], weights)
    side = packed.buffer[-64:].view(np.uint32)
    assert side[0] == 0x7F7F | 1023 << 16
    for wrong in (0x7F7E | 1023 << 16, 0x7F7F | 1022 << 16):
        side[0] = wrong
        assert (decode(packed.buffer, *weights.shape) != weights).any()
        assert (packed.exported()[0].view(np.uint16) != weights).any()


def test_what_gaussian_weights_take() -> None:
    """The bytes that the README promises for a matrix of Qwen3-30B-A3B."""
    rng = np.random.default_rng(0)
    for n, k in ((768, 2048), (2048, 768)):
        packed = pack(BF16Z, VARIANTS[0], gaussian(rng, (n, k)))
        assert packed.nbytes * 8 / (n * k) <= 12.2
