"""Experts without a gate, in files of an architecture that has such."""

from __future__ import annotations

from pathlib import Path

import gguf_files
import numpy as np
import pytest
from gguf_files import FIELDS

import ktk
from ktk.checkpoint import describe, open_checkpoint
from ktk.errors import CheckpointError

ARCH = "nemotron_h_moe"


def parts(kind: str = "Q8_0") -> dict[str, gguf_files.Tensor]:
    made = gguf_files.experts(kind)
    del made["gate"]
    return made


def test_up_and_down_are_read(tmp_path: Path) -> None:
    made = parts()
    path = gguf_files.write(tmp_path / "model.gguf", gguf_files.stacked(made), arch=ARCH)
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.layer(0)
        assert (found.config.gated, found.config.activation) == (False, "relu2")
        expert = found.values(2)
        assert expert.gate is None
        assert np.array_equal(expert.up.data, made["up"].values[2])
        assert np.array_equal(expert.down.data, made["down"].values[2])
    moe = ktk.MoE.from_checkpoint(path, 0)
    assert moe.backend.name == "LLAMAFILE"
    assert moe.unpack_expert(0)[0] is None


def test_the_width_inside_a_model_is_that_of_experts(tmp_path: Path) -> None:
    fields = {**FIELDS, "embedding_length": 2 * gguf_files.H, "moe_latent_size": gguf_files.H}
    path = tmp_path / "model.gguf"
    gguf_files.write(path, gguf_files.stacked(parts()), arch=ARCH, fields=fields)
    assert ktk.MoE.from_checkpoint(path, 0).config.hidden_size == gguf_files.H
    assert describe(path).config.model_hidden_size == 2 * gguf_files.H


def test_a_gate_that_nobody_expects_is_named(tmp_path: Path) -> None:
    made = gguf_files.stacked(gguf_files.experts())
    path = gguf_files.write(tmp_path / "model.gguf", made, arch=ARCH)
    with pytest.raises(CheckpointError, match=r"ffn_gate_exps\.weight.* is none that ktk reads"):
        ktk.MoE.from_checkpoint(path, 0)
