"""Columns of a matrix in another order than the model has them: GPTQ with desc_act.

Column i of what is stored is column ``order[i]`` of the matrix. Groups of columns that share a
scale then lie side by side, and products have an input whose columns are sorted the same way. The
input of down is what gate and up make, so that their rows are sorted in its place, once:

    x --sorted as gate is--> gate --+                      rows of gate and up: in down's order
    x --sorted as up is----> up   --+--> h, in down's order --> down
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ktk.arrays import Array, is_tensor
from ktk.expert import Expert, Matrix


def with_sorted_rows(expert: Expert) -> Expert:
    """Return an expert whose gate and up have their rows in the order of down's columns.

    Raises
    ------
    ValueError
        Rows share scales, so that they cannot go elsewhere.
    """
    order = expert.down.order
    if order is None:
        return expert
    up = _sorted("up", expert.up, order)
    gate = None if expert.gate is None else _sorted("gate", expert.gate, order)
    return replace(expert, gate=gate, up=up)


def _sorted(name: str, matrix: Matrix, order: Array) -> Matrix:
    fmt, n = matrix.format, len(matrix.data)
    if fmt is not None and fmt.scale != "none" and fmt.group_n > 1:
        raise ValueError(
            f"{fmt.group_n} rows of {name} share a scale ({fmt}), and cannot be put into the order "
            "of down's columns: give down without an order"
        )

    def rows(array: Any) -> Any:
        """Sort what has an entry for each row; a scale may be one for all."""
        return array if array is None or len(array) != n else _rows(array, order)

    beside = ("data", "scale", "zero", "bias")
    arrays: dict[str, Any] = {one: rows(getattr(matrix, one)) for one in beside}
    return replace(matrix, **arrays)


def _rows(array: Any, order: Array) -> Any:
    import numpy as np

    index = np.asarray(order).astype(np.int64)
    if not is_tensor(array):
        return np.asarray(array)[index]
    import torch

    return array[torch.from_numpy(index)]
