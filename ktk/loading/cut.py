"""Cuts experts for the ranks of tensor parallelism: each gets some columns of every expert.

A rank has these rows of gate and up, the same columns of down, and returns its part of a sum. Its
columns are whole groups of scales, so that codes are cut and never made anew; ranks may therefore
differ by a group.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ktk._core import Format
from ktk.expert import Expert, Matrix
from ktk.formats import is_blocks
from ktk.order import with_sorted_rows
from ktk.quantize import dequantize

# What kernels like the columns of a layer to be a multiple of.
_ALIGNED = 32


def columns_of(expert: Expert, size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return which columns of the intermediate size are a rank's: the first, and the one behind.

    Parameters
    ----------
    expert
        Any of the layer: its formats say where may be cut.
    size
        The intermediate size.
    rank, ranks
        Which of how many.

    Raises
    ------
    ValueError
        Groups are too large for so many ranks.
    """
    *rows, down = (_format(matrix) for matrix in expert.matrices.values())
    parts = (*(one.group_n or 1 for one in rows), down.group_k or 1, down.block[0])
    unit = math.lcm(*parts)
    if size // (wide := math.lcm(unit, _ALIGNED)) >= ranks and size % wide == 0:
        unit = wide
    units = -(-size // unit)
    if units < ranks:
        raise ValueError(
            f"an intermediate size of {size} stored as {down} cannot be divided over {ranks} "
            f"ranks: {unit} columns belong together. Use at most {units} ranks, or divide experts "
            "instead (expert parallelism)"
        )
    first, behind = (units * at // ranks * unit for at in (rank, rank + 1))
    return first, min(behind, size)


def cut_expert(expert: Expert, first: int, behind: int, rank: int) -> Expert:
    """Return the columns of an expert from `first` up to `behind`; rank 0 adds the bias of down."""
    # Columns that are cut have no order any more: rows of gate and up are in it.
    expert = with_sorted_rows(expert)
    down = cut_columns(replace(expert.down, order=None), first, behind)
    if down.bias is not None and rank:
        down = replace(down, bias=torch.zeros_like(torch.as_tensor(down.bias, device="cpu")))
    return Expert(
        gate=None if expert.gate is None else cut_rows(expert.gate, first, behind),
        up=cut_rows(expert.up, first, behind),
        down=down,
    )


def cut_rows(matrix: Matrix, first: int, behind: int) -> Matrix:
    """Return rows of a matrix, which are whole groups of its scales."""
    extent = _format(matrix).group_n
    groups = slice(None) if extent == 0 else slice(first // extent, -(-behind // extent))
    rows = slice(first, behind)
    return replace(
        matrix,
        data=matrix.data[rows],
        scale=None if matrix.scale is None else matrix.scale[groups],
        zero=None if matrix.zero is None else matrix.zero[groups],
        bias=None if matrix.bias is None else matrix.bias[rows],
    )


def cut_columns(matrix: Matrix, first: int, behind: int) -> Matrix:
    """Return columns of a matrix, which are whole groups of its scales; the bias stays.

    Of a matrix in whose order these are somewhere, floats are returned.
    """
    if matrix.order is not None:
        values = dequantize(matrix)[:, first:behind].contiguous()
        return Matrix(Format("f32"), values, bias=matrix.bias)
    fmt = _format(matrix)
    extent = fmt.group_k
    groups = slice(None) if extent == 0 else slice(first // extent, -(-behind // extent))
    # Two elements of four bits share a byte, and those of ggml's blocks many.
    columns, nbytes = fmt.block
    each = nbytes if is_blocks(fmt) else 1
    items = slice(first // columns * each, -(-behind // columns) * each)
    return replace(
        matrix,
        data=matrix.data[:, items],
        scale=None if matrix.scale is None else matrix.scale[:, groups],
        zero=None if matrix.zero is None else matrix.zero[:, groups],
    )


def _format(matrix: Matrix) -> Format:
    assert matrix.format is not None, "schemes know what they decode"
    return matrix.format
