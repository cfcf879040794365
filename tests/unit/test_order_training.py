"""Adapters and gradients of experts whose columns are in orders.

Both are of rows and columns as the model has them, in whatever order these are packed: a layer of
the same values without orders is what they are compared with.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ordered import SHAPES, SIZES, E, chosen, expert, layer

import ktk
from ktk.expert import Expert, Matrix
from ktk.quantize import dequantize


def adapter(
    dtype: torch.dtype, sizes: dict[str, tuple[int, int]] = SIZES, seed: int = 5, rank: int = 5
) -> ktk.Lora:
    generator = torch.Generator().manual_seed(seed)
    factors = {}
    for part, (n, k) in sizes.items():
        factors[f"{part}_a"] = (torch.randn(E, rank, k, generator=generator) * 0.3).to(dtype)
        factors[f"{part}_b"] = (torch.randn(E, n, rank, generator=generator) * 0.3).to(dtype)
    return ktk.Lora(**factors, scale=0.5)


def pair(*, joint: bool, sizes: dict[str, tuple[int, int]] = SIZES) -> tuple[ktk.MoE, ktk.MoE]:
    """BF16 with and without orders, of the same values."""
    experts = [expert("bf16", e, tuple(sizes), joint=joint, sizes=sizes) for e in range(E)]
    values = []
    for one in experts:
        made: dict[str, Any] = {
            part: Matrix(ktk.Format("bf16"), dequantize(m).bfloat16(), bias=m.bias)
            for part, m in one.matrices.items()
        }
        values.append(Expert(**({"gate": None} | made)))
    return layer("BF16", experts, shards=2), layer("BF16", values, shards=2)


def close(got: Any, want: Any, what: str) -> None:
    """Sums in two orders, of factors that are rounded to bf16 on their way: 8 bits, three times."""
    got, want = torch.as_tensor(got).float(), torch.as_tensor(want).float()
    assert (got - want).abs().max() <= 2**-6 * want.abs().max(), what


@pytest.mark.parametrize("sizes", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("joint", [True, False], ids=["gate as up", "gate and up"])
def test_adapters_see_rows_and_columns_as_they_were(
    dtype: torch.dtype, joint: bool, sizes: str
) -> None:
    moe, unsorted = pair(joint=joint, sizes=SHAPES[sizes])
    hidden, ids, weights = chosen(33, width=SHAPES[sizes]["up"][1])
    lora = adapter(dtype, SHAPES[sizes])
    # What the adapter changes, which rows elsewhere would not.
    y, want = (
        one(hidden, ids, weights, lora=lora) - one(hidden, ids, weights) for one in (moe, unsorted)
    )
    close(y, want, "y")


@pytest.mark.parametrize("kept", [True, False], ids=["products kept", "computed again"])
@pytest.mark.parametrize(
    ("joint", "sizes"),
    [(True, "gated"), (False, "gated"), (True, "without a gate"), (False, "wide")],
)
def test_gradients_are_of_rows_and_columns_as_they_were(
    joint: bool, sizes: str, kept: bool
) -> None:
    width = SHAPES[sizes]["up"][1]
    hidden, ids, weights = chosen(33, width=width)
    lora = adapter(torch.float32, SHAPES[sizes])
    dy = torch.randn(33, width, generator=torch.Generator().manual_seed(8))
    found = []
    for moe in pair(joint=joint, sizes=SHAPES[sizes]):
        call: dict[str, Any] = {"lora": lora}
        if kept:
            _, call["saved"] = moe.forward_train(hidden, ids, weights, lora=lora)
        found.append(moe.backward(dy, hidden, ids, weights, weight_grads=True, **call))
    got, want = found
    close(got.hidden, want.hidden, "hidden")
    close(got.topk_weights, want.topk_weights, "topk_weights")
    assert want.lora is not None
    assert got.lora is not None
    for name, values in want.lora.factors():
        close(dict(got.lora.factors())[name], values, name)
    for part in SHAPES[sizes]:
        close(getattr(got.weights, part), getattr(want.weights, part), part)
        bias = f"{part}_bias"
        close(getattr(got.weights, bias), getattr(want.weights, bias), part)
