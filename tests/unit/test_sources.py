"""What a weight matrix may come as, and what is said when its arrays do not fit together."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import ktk
from ktk import Format

H, I = 64, 128  # noqa: E741 - the names of the documentation
INT8 = Format("i8", "f32", "none", 1, 0)


@pytest.fixture
def moe() -> ktk.MoE:
    sizes: dict[str, Any] = {
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return ktk.load_backend("AMXINT8").moe(**sizes, pool=ktk.WorkerPool(1, pin=False))


def weights(**changes: Any) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, (n, k) in {"gate": (I, H), "up": (I, H), "down": (H, I)}.items():
        arrays[name] = np.ones((n, k), np.int8)
        arrays[f"{name}_scale"] = np.ones((n, 1), np.float32)
    return {"given": INT8, **arrays, **changes}


def test_arrays_that_fit_are_taken(moe: ktk.MoE) -> None:
    moe.load_expert(0, **weights())
    assert moe.format == INT8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_scale": None}, "gate: i8 with f32 scales per 1 x k needs a scale"),
        ({"up_zero": np.ones((I, 1), np.uint8)}, "up: i8 .* takes no zero point"),
        ({"down_scale": np.ones((H, 2), np.float32)}, r"down_scale has shape \[64, 2\]"),
        (
            {"given": Format("i8", "f32", "u8", 1, 0)},
            "gate: i8 with f32 scales and u8 zero points per 1 x k needs a zero point",
        ),
    ],
)
def test_arrays_that_contradict_their_format_are_refused(
    moe: ktk.MoE, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        moe.load_expert(0, **weights(**changes))


def test_scales_of_another_type_are_not_read_as_what_was_said(moe: ktk.MoE) -> None:
    wide = np.ones((I, 1), np.float16)
    message = re.escape("gate_scale is [128, 1] float16, which does not hold f32")
    with pytest.raises(TypeError, match=message):
        moe.load_expert(0, **weights(gate_scale=wide))


def test_one_block_of_scales_may_span_the_matrix() -> None:
    """Where 128 rows are all there are, their group is inferred to be the whole extent."""
    size = 128
    sizes: dict[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1}
    moe = ktk.load_backend("FP8").moe(
        **sizes, hidden_size=size, intermediate_size=size, pool=ktk.WorkerPool(1, pin=False)
    )
    one = np.full((size, size), 0x38, np.uint8)  # 1.0
    scale = np.full((1, 1), 0.5, np.float32)
    names = ("gate", "up", "down")
    arrays: dict[str, Any] = dict.fromkeys(names, one)
    arrays |= {f"{name}_scale": scale for name in names}
    moe.load_expert(0, **arrays, given=Format("e4m3", "f32", "none", 0, 0))
    for matrix in moe.unpack_expert(0):
        np.testing.assert_array_equal(matrix, np.full((size, size), 0.5, np.float32))
