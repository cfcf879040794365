"""Finer groups: scales that are repeated, so that a backend keeps codes whose groups it has not.

A group of 512 columns is two of 256 with the same scale and zero point, and a row is any number of
them: each value is what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ktk._core import Format
from ktk.expert import Matrix


def finer_formats(stored: Format, taken: Sequence[Format]) -> Iterator[Format]:
    """Yield the formats among `taken` that have finer groups of columns; the coarsest first."""
    for fmt in sorted(taken, key=lambda one: one.group_k, reverse=True):
        same = Format(fmt.element, fmt.scale, fmt.zero, fmt.group_n, stored.group_k) == stored
        if same and fmt.scale != "none" and fmt.group_k and stored.group_k % fmt.group_k == 0:
            yield fmt


def regrouped(matrix: Matrix, fmt: Format, columns: int) -> Matrix:
    """Return a matrix of tensors in finer groups.

    Parameters
    ----------
    matrix
        Of tensors, with its format.
    fmt
        One of `finer_formats`.
    columns
        Of the matrix.
    """
    assert matrix.format is not None, "readers know what they give"
    groups = -(-columns // fmt.group_k)
    times = matrix.format.group_k // fmt.group_k or groups

    def repeated(of_group: Any) -> Any:
        if of_group is None:
            return None
        return of_group.repeat_interleave(times, 1)[:, :groups].contiguous()

    return replace(matrix, format=fmt, scale=repeated(matrix.scale), zero=repeated(matrix.zero))
