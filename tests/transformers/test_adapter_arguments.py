"""Arguments of `add_lora` and `load_adapter` that mean nothing are told in a sentence each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from tiny import FAMILIES
from training import packed, randomize

import ktk.sft
from ktk.transformers import adapter

folder, model, same_draws = training.folder, training.model, training.same_draws

INTEGER = "rank must be an integer from 1, got"
NUMBER = "alpha must be a number, got"
FINITE = "alpha must be a finite number of float32, got"
NAMES = "targets must be a sequence of names, as"
SOME = "targets must be some of gate, up, down, got"
FLOATS = r"dtype must be .*float32.* of torch, got"

WRONG: list[tuple[str, Any, type[Exception], str]] = [
    ("rank", True, TypeError, INTEGER),
    ("rank", 2.5, TypeError, INTEGER),
    ("rank", "8", TypeError, INTEGER),
    ("rank", None, TypeError, INTEGER),
    ("rank", -1, ValueError, "rank must be at least 1, got -1"),
    ("alpha", "x", TypeError, NUMBER),
    ("alpha", None, TypeError, NUMBER),
    ("alpha", True, TypeError, NUMBER),
    ("alpha", float("nan"), ValueError, FINITE),
    ("alpha", float("inf"), ValueError, FINITE),
    ("alpha", -1e39, ValueError, FINITE),
    ("alpha", 10**400, ValueError, FINITE),
    ("targets", "gate", TypeError, NAMES),
    ("targets", 1, TypeError, NAMES),
    ("targets", (), ValueError, SOME),
    ("targets", ["gate_proj"], ValueError, SOME),
    ("dtype", torch.float64, ValueError, FLOATS),
    ("dtype", torch.int8, ValueError, FLOATS),
    ("dtype", torch.float8_e4m3fn, ValueError, FLOATS),
    ("dtype", "float32", TypeError, FLOATS),
    ("dtype", None, TypeError, FLOATS),
    ("keep_products", 1, TypeError, "keep_products must be True or False, got 1"),
]


@pytest.fixture(scope="module")
def shared(folder: Path) -> Any:
    return packed(folder)


@pytest.mark.parametrize(("name", "value", "kind", "sentence"), WRONG)
def test_what_means_nothing_is_refused_by_name(
    shared: Any, name: str, value: Any, kind: type[Exception], sentence: str
) -> None:
    with pytest.raises(kind, match=f"^{sentence}"):
        ktk.sft.add_lora(shared, **{name: value})
    assert not adapter.has_lora(shared)


def test_a_dtype_is_checked_where_an_adapter_is_read(model: Any, tmp_path: Path) -> None:
    ktk.sft.add_lora(model, rank=2)
    ktk.sft.save_adapter(model, tmp_path)
    for dtype, kind in ((torch.float64, ValueError), ("float32", TypeError)):
        with pytest.raises(kind, match=FLOATS):
            ktk.sft.load_adapter(model, tmp_path, dtype=dtype)  # type: ignore[arg-type]


def test_what_means_the_same_is_taken(folder: Path) -> None:
    """Integers of numpy, and targets in any order and as often as they come."""
    found = []
    for rank, targets in ((2, ("gate", "down")), (np.int64(2), ["down", "gate", "gate"])):
        torch.manual_seed(0)
        found.append(ktk.sft.add_lora(packed(folder), rank=rank, targets=targets))  # type: ignore[arg-type]
    assert len(found[0]) == len(found[1]) == 2 * 4
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_experts_without_a_gate_have_adapters_by_default(tmp_path: Path) -> None:
    model = packed(FAMILIES["nemotron-h"].save(tmp_path))
    with pytest.raises(ValueError, match="have no gate: targets are up and down"):
        ktk.sft.add_lora(model, targets=("gate", "up", "down"))
    assert not adapter.has_lora(model)
    factors = ktk.sft.add_lora(model, rank=2)
    randomize(factors)
    named = [name for name, one in model.named_parameters() if any(one is f for f in factors)]
    assert {name.rsplit(".", 1)[1].split("_")[0] for name in named} == {"up", "down"}
