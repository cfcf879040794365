"""Rows of tokens that go to a rank, and sums that come back from it.

Small arrays are numpy's: between two layers that stream weights through the caches, each operation
of torch costs several microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from ktk.distributed.call import Tokens
from ktk.distributed.frames import view
from ktk.distributed.placement import Part
from ktk.moe import MoE
from ktk.ticket import Ticket

#: hidden [rows, hidden_size], ids as int32 and weights as f32 [rows, k].
Rows = tuple[torch.Tensor, np.ndarray, np.ndarray]


def rows_of(part: Part, tokens: Tokens, begin: int, end: int) -> Rows:
    """Return a part's rows of the chunk from `begin` to `end`."""
    hidden, weights = tokens.hidden, tokens.weights
    if end - begin < tokens.count:
        hidden, weights = hidden[begin:end], weights[begin:end]
    if part.rows is None:
        return hidden, part.ids, weights
    return hidden[torch.from_numpy(part.rows)], part.ids, weights[part.rows]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a rank computes at once.

    Attributes
    ----------
    rows
        As a layer takes them.
    counts : dict of int to int
        How many of them are of each rank that has some, in this order.
    """

    rows: Rows
    counts: dict[int, int]

    @classmethod
    def of(cls, parts: dict[int, Rows]) -> Batch | None:
        """Put the rows of ranks one behind the other; None if there are none."""
        some = {rank: part for rank, part in sorted(parts.items()) if len(part[1])}
        counts = {rank: len(part[1]) for rank, part in some.items()}
        if not some:
            return None
        if len(some) == 1:
            return cls(next(iter(some.values())), counts)
        hidden, ids, weights = zip(*some.values(), strict=True)
        return cls((torch.cat(hidden), np.concatenate(ids), np.concatenate(weights)), counts)

    def sums(self) -> np.ndarray:
        """Return memory for the sums: f32 [rows, hidden_size]."""
        return np.empty(tuple(self.rows[0].shape), np.float32)

    def compute(self, moe: MoE, sums: np.ndarray) -> None:
        """Compute all rows."""
        moe(*self.rows, out=sums)

    def submit(self, moe: MoE, sums: np.ndarray) -> Ticket:
        """Compute all rows while the caller does something else."""
        return moe.submit(*self.rows, out=sums)

    def divide(self, sums: np.ndarray) -> dict[int, np.ndarray]:
        """Return the sums of each rank's rows."""
        ends = np.cumsum(list(self.counts.values()))[:-1]
        return dict(zip(self.counts, np.split(sums, ends), strict=True))


def packed_rows(rows: Rows) -> list[memoryview]:
    """Return rows as bytes, those of four-byte elements first."""
    hidden, ids, weights = rows
    return [view(ids), view(weights), view(hidden)]


def unpacked_rows(data: np.ndarray, count: int, k: int, width: int, dtype: torch.dtype) -> Rows:
    """Return what `packed_rows` packed; no copy."""
    each = 4 * count * k
    ids, weights = data[:each].view(np.int32), data[each : 2 * each].view(np.float32)
    hidden = torch.from_numpy(data[2 * each :]).view(dtype).view(count, width)
    return hidden, ids.reshape(count, k), weights.reshape(count, k)


def add_up(parts: Iterable[tuple[np.ndarray | None, np.ndarray]], out: torch.Tensor) -> None:
    """Add up sums of ranks, in the order that they come in, and write them as what `out` is.

    The arrays that are added may be changed.
    """
    total: np.ndarray | None = None
    for rows, sums in parts:
        if rows is None:
            total = sums if total is None else np.add(total, sums, out=total)
        elif total is None:
            total = np.zeros(tuple(out.shape), np.float32)
            total[rows] = sums
        else:
            total[rows] += sums
    if total is None:
        out.zero_()
    else:
        out.copy_(torch.from_numpy(total))
