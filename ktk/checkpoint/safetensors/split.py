"""Turns a stored part into what `MoE.load_expert` takes: gate and up, output columns first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ktk.checkpoint.safetensors.families import Stored
from ktk.checkpoint.safetensors.scheme import StorageError
from ktk.expert import Matrix


def split_tensor(part: str, tensor: torch.Tensor, axes: list[str]) -> dict[str, torch.Tensor]:
    """Turn one stored part into the arguments it stands for."""
    suffix = "_bias" if part.endswith("_bias") else ""
    if not part.startswith("gate_up"):
        return {part: _oriented(part, tensor, axes)}
    both = next(axis for axis in axes if axis in ("2I", "I2"))
    dim = axes.index(both)
    if both == "2I":
        gate, up = tensor.chunk(2, dim)
    else:
        rows = tensor.movedim(dim, 0)
        gate, up = rows[0::2].movedim(0, dim), rows[1::2].movedim(0, dim)
    single = ["I" if axis == both else axis for axis in axes]
    return {
        "gate" + suffix: _oriented("gate", gate, single),
        "up" + suffix: _oriented("up", up, single),
    }


def split_matrix(part: str, matrix: Matrix, stored: Stored) -> dict[str, Matrix]:
    """Divide gate and up, which share a tensor, by rows."""
    if not part.startswith("gate_up"):
        return {part: _contiguous(matrix)}
    alternating = "I2" in stored.axes.split()
    assert matrix.format is not None, "schemes know what they decode"
    rows, extent = matrix.data.shape[0] // 2, matrix.format.group_n
    if extent != 1 and (alternating or extent == 0 or rows % extent):
        raise StorageError(f"has scales per {extent or 2 * rows} rows, of gate and of up together")

    def half(array: torch.Tensor | None, at: int) -> torch.Tensor | None:
        if array is None:
            return None
        return array[at::2] if alternating else array.chunk(2)[at]

    found = {}
    for at, name in enumerate(("gate", "up")):
        arrays: dict[str, Any] = {
            what: half(getattr(matrix, what), at) for what in ("data", "scale", "zero")
        }
        found[name] = _contiguous(replace(matrix, **arrays))
    return found


def _oriented(part: str, tensor: torch.Tensor, axes: list[str]) -> torch.Tensor:
    """Put output columns first, depth second."""
    wanted = ["H", "I"] if part == "down" else ["I", "H"]
    if len(axes) == 2 and axes != wanted:
        tensor = tensor.T
    return tensor.contiguous()


def _contiguous(matrix: Matrix) -> Matrix:
    arrays: dict[str, Any] = {name: getattr(matrix, name) for name in ("data", "scale", "zero")}
    whole: dict[str, Any] = {
        name: None if array is None else array.contiguous() for name, array in arrays.items()
    }
    return replace(matrix, **whole)
