"""Weights of bf16 as their bits: as models have them, and such as encoders may stumble over."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

import ktk
from ktk import _core

U16 = npt.NDArray[np.uint16]


def pack(backend: ktk.Backend | _core.Backend, variant: str, weights: U16) -> _core.PackedMatrix:
    """Pack bits of bf16."""
    data = torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
    core = backend.core if isinstance(backend, ktk.Backend) else backend
    return _core.PackedMatrix(core, variant, data)


def gaussian(rng: np.random.Generator, shape: tuple[int, int]) -> U16:
    """Weights as most models have them."""
    values = torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(0.02))
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def any_bits(rng: np.random.Generator, shape: tuple[int, int]) -> U16:
    """NaN, infinities, subnormals, and all between: nothing to compress."""
    return rng.integers(0, 1 << 16, shape, np.uint16)


def with_exponents(rng: np.random.Generator, shape: tuple[int, int], exponents: list[int]) -> U16:
    """Any signs and mantissas, but these exponents."""
    found = rng.choice(exponents, shape).astype(np.uint16) << np.uint16(7)
    return (any_bits(rng, shape) & np.uint16(0x807F)) | found


def last_lane() -> U16:
    """A block whose largest exponent, and only patch, is in the last lane of its last line."""
    weights = with_exponents(np.random.default_rng(1), (32, 64), list(range(100, 116)))
    weights[31, 63] = 0x7F7F
    return weights


def crowded_group() -> U16:
    """As many patches as fit, in all lines of one group, and in the last one of the next step."""
    weights = with_exponents(np.random.default_rng(2), (32, 128), list(range(100, 116)))
    for n, k in ((0, 36), (15, 37), (16, 36), (31, 37), (0, 38), (15, 39), (16, 38), (31, 39)):
        weights[n, k] = 0x7F00 + n
    weights[7:14, 38] = 0xFF01
    weights[31, 95] = 1
    return weights


def zero_block() -> U16:
    """A block of zeros, one of negative zeros, and one that has both and a subnormal."""
    weights = np.zeros((96, 96), np.uint16)
    weights[32:64] = 0x8000
    weights[64:, ::2] = 0x8000
    weights[80, 7] = 1
    return weights


def other_escapes() -> U16:
    """Weights of a model, and one in a hundred with any bits."""
    rng = np.random.default_rng(5)
    weights = gaussian(rng, (64, 640))
    weights[rng.integers(64, size=30), rng.integers(640, size=30)] = rng.integers(
        0x6000, 0x7F00, 30
    )
    return weights


def largest_in_last_lanes() -> U16:
    """15 exponents, and in the last lane of each row a larger one: more than there is room for."""
    weights = with_exponents(np.random.default_rng(6), (32, 64), list(range(101, 116)))
    weights[:, -1] = np.arange(200, 232, dtype=np.uint16) << 7
    return weights
