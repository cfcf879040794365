"""A whole model in BF16Z, its dense layers and head too, computes what one in BF16 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny import FAMILIES

import ktk.transformers
from ktk.conversion import convert
from ktk.transformers.dense import packed_linears
from ktk.transformers.packed import packed_modules


def load(folder: Path, backend: str) -> Any:
    return ktk.transformers.load(folder, backend=backend, linears=backend, head=backend).eval()


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_the_logits_are_those_of_bf16(name: str, tmp_path: Path) -> None:
    folder = FAMILIES[name].save(tmp_path)
    plain, packed = load(folder, "BF16"), load(folder, "BF16Z")
    for length in (1, 24):
        ids = tiny.tokens(length=length)
        assert torch.equal(tiny.logits(packed, ids), tiny.logits(plain, ids))
    found = packed_linears(packed)
    assert "lm_head" in found
    assert {one.linear.backend.name for one in found.values()} == {"BF16Z"}
    experts = [packed_modules(model).values() for model in (packed, plain)]
    assert all(experts)


def test_what_was_converted_is_the_checkpoint(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3-moe"].save(tmp_path / "model")
    convert(folder, tmp_path / "converted", backend="BF16Z")
    plain = ktk.MoE.from_checkpoint(folder, 0, backend="BF16")
    packed = ktk.MoE.from_checkpoint(tmp_path / "converted", 0)
    assert packed.backend.name == "BF16Z"
    assert packed.nbytes < plain.nbytes
    for expert in range(plain.config.num_experts):
        for ours, theirs in zip(
            packed.unpack_expert(expert), plain.unpack_expert(expert), strict=True
        ):
            assert np.asarray(ours == theirs).all()
