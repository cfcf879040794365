"""Columns of a matrix in another order than the model has them: GPTQ with desc_act.

Column i of what is stored is column ``order[i]`` of the matrix. Groups of columns that share a
scale then lie side by side, and products have an input whose columns are sorted the same way. The
input of down is what gate and up make, so that their rows are sorted in its place, once:

    x --sorted as gate is--> gate --+                      rows of gate and up: in down's order
    x --sorted as up is----> up   --+--> h, in down's order --> down
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ktk.arrays import Array, is_tensor
from ktk.expert import Expert, Matrix

if TYPE_CHECKING:
    import numpy as np


def with_sorted_rows(expert: Expert) -> Expert:
    """Return an expert whose gate and up have their rows in the order of down's columns.

    Raises
    ------
    ValueError
        Rows share scales, so that they cannot go elsewhere, or what is given is no order of them.
    """
    if expert.down.order is None:
        return expert
    order = _checked(expert.down.order, len(expert.up.data))
    up = _sorted("up", expert.up, order)
    gate = None if expert.gate is None else _sorted("gate", expert.gate, order)
    return replace(expert, gate=gate, up=up)


def _checked(given: Array, rows: int) -> np.ndarray:
    import numpy as np

    order = np.asarray(given)
    if order.dtype.kind != "i" or not np.array_equal(np.sort(order, axis=None), np.arange(rows)):
        raise ValueError(f"down_order must be integers that have each of 0 to {rows - 1} once")
    return order.reshape(-1).astype(np.int64)


def _sorted(name: str, matrix: Matrix, order: np.ndarray) -> Matrix:
    fmt, n = matrix.format, len(matrix.data)
    if n != len(order):
        return matrix  # of another shape than up: an error of who loads it
    shared = ""
    if fmt is not None and fmt.scale != "none" and fmt.group_n > 1:
        shared = f"{fmt.group_n} rows of {name} share a scale ({fmt})"
    elif fmt is None and matrix.scale is not None and len(matrix.scale) not in (1, n):
        shared = f"rows of {name} share {len(matrix.scale)} rows of scales"
    if shared:
        raise ValueError(
            f"{shared}, and cannot be put into the order of down's columns: give down without an "
            "order"
        )

    def rows(array: Any) -> Any:
        """Sort what has an entry for each row; a scale may be one for all."""
        return array if array is None or len(array) != n else _rows(array, order)

    beside = ("data", "scale", "zero", "bias")
    arrays: dict[str, Any] = {one: rows(getattr(matrix, one)) for one in beside}
    return replace(matrix, **arrays)


def _rows(array: Any, order: np.ndarray) -> Any:
    import numpy as np

    if not is_tensor(array):
        return np.asarray(array)[order]
    import torch

    return array[torch.from_numpy(order)]
