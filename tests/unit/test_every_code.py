"""Kernels read each code of FP8 as its value, beside whatever other codes."""

from __future__ import annotations

import pytest
import torch

import ktk
from ktk.quantize import Quantized

N, K = 64, 256
VARIANTS = [one.name for one in ktk.load_backend("FP8").variants if one.runnable]


# One row to few, and enough for runs that are decoded once.
@pytest.mark.parametrize("rows", [1, 2, 5, 13, K])
@pytest.mark.parametrize(
    "scales", ["f32 scales per 128 x 128", "f32 scales per 1 x k", "ue8m0 scales per 1 x 32"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_code_is_its_value(variant: str, scales: str, rows: int) -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every[[0x7F, 0xFF]] = 0  # NaN
    # All codes in each row of weights: subnormal ones alone in their lines, and side by side.
    codes = torch.stack([every.roll(5 * n) for n in range(N)])
    values = codes.view(torch.float8_e4m3fn).double()
    shape = {"128": (1, 2), "k": (N, 1), "32": (N, K // 32)}[scales.split()[-1]]
    eight = (130, torch.uint8) if "ue8m0" in scales else (8, torch.float32)
    backend = ktk.load_backend("FP8")
    stored = next(one for one in backend.formats if str(one) == f"e4m3 with {scales}")
    linear = backend.linear(K, N, weight_format=stored, variant=variant, pool=ktk.WorkerPool(1))
    linear.load([Quantized(stored, codes, torch.full(shape, eight[0], dtype=eight[1]))])
    for begin in range(0, K, rows):
        x = torch.eye(K)[begin : begin + rows]
        assert torch.equal(linear(x).double(), 8 * x.double() @ values.T)
