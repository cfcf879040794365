"""Checkpoints of experts that are stored in any way, and what is read of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from schemes import CONFIG, NAMES, SIZES, E, Tensors

import ktk
from ktk import Format
from ktk.checkpoint import open_checkpoint

#: By part and expert.
Keys = tuple[str, int]
Values = Mapping[Keys, np.ndarray]
F32 = Format("f32")


def save(
    folder: Path,
    made: Mapping[Keys, Tensors],
    quantization: dict[str, Any],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a checkpoint of one layer, whose matrices are tensors by what follows their names."""
    entries = {**CONFIG, "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(entries))
    tensors = {
        NAMES[part].format(e=e) + suffix: tensor
        for (part, e), each in made.items()
        for suffix, tensor in each.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata)


def assert_means(folder: Path, values: Values, fmt: Format) -> None:
    """What is read is in this format, and means these values exactly."""
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(3)
        assert {one.format for one in layer.formats.values()} == {fmt}
        assert layer.has_floats is False
        for e in range(E):
            layer.check_expert(e)
            expert = layer.expert(e)
            assert {one.format for one in expert.matrices.values()} == {fmt}
            assert all(array.is_contiguous() for array in expert.arrays().values())
            for part, matrix in layer.values(e).matrices.items():
                np.testing.assert_array_equal(matrix.data, values[part, e])


def assert_loads(folder: Path, values: Values, backend: str, dtype: torch.dtype) -> None:
    """The backend that is taken by default has these values, rounded to its elements."""
    moe = ktk.MoE.from_checkpoint(folder, 3)
    assert moe.backend.name == backend
    for e in range(E):
        for part, matrix in zip(SIZES, moe.unpack_expert(e), strict=True):
            want = torch.from_numpy(values[part, e]).float().to(dtype).float()
            np.testing.assert_array_equal(matrix, want)
