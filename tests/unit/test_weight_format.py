"""weight_format takes formats and their names, for all matrices or for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ktk
from ktk.formats import label

from .test_zero_experts import Z, checkpoint

E, DEPTH = 2, 512  # deeper than any group, or rows would be groups
SIZES: dict[str, Any] = {
    "num_experts": E,
    "num_experts_per_tok": 2,
    "hidden_size": DEPTH,
    "intermediate_size": DEPTH,
}


def stored(moe: ktk.MoE) -> tuple[str, ...]:
    torch.manual_seed(0)
    if not moe.loaded:
        moe.load(*(torch.randn(E, DEPTH, DEPTH) for _ in range(3)))
    formats = (moe.format, moe.up_format, moe.down_format)
    return tuple(label(fmt) for fmt in formats if fmt is not None)


def test_a_name_is_as_good_as_a_format() -> None:
    backend = ktk.load_backend("AMXINT4")
    assert len(backend.formats) > 1
    of_floats = [fmt for fmt in backend.formats[:4] if fmt.zero == "none"]
    for fmt in of_floats:
        for wanted in (fmt, label(fmt), str(fmt)):
            assert stored(backend.moe(**SIZES, weight_format=wanted)) == (label(fmt),) * 3


def test_each_matrix_may_have_its_own() -> None:
    backend = ktk.load_backend("AMXINT4")
    default = label(backend.formats[0])
    other = label(backend.formats[1])
    moe = backend.moe(**SIZES, weight_format=(None, other, backend.formats[0]))
    assert stored(moe) == (stored(backend.moe(**SIZES))[0], other, default)


def test_checkpoints_take_names(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    backend = ktk.load_backend("AMXINT4")
    fmt = next(f for f in backend.formats if f.group_k == 32)
    for wanted in (fmt, label(fmt), (label(fmt),) * 3):
        moe = ktk.MoE.from_checkpoint(tmp_path / "source", 1, backend, weight_format=wanted)
        assert stored(moe) == (label(fmt),) * 3
        assert moe.config.zero_expert_num == Z


@pytest.mark.parametrize(
    ("wanted", "error", "sentence"),
    [
        (3, TypeError, "weight_format must be a Format, its name or a list of such, got 3"),
        ("nonsense-9", ValueError, "'nonsense-9' is not the name of a format"),
        (("bf16",), ValueError, "one format, or three, for gate, up and down, got 1"),
    ],
)
def test_what_is_none_is_told(wanted: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        ktk.load_backend("AMXINT4").moe(**SIZES, weight_format=wanted)
