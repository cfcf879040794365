"""Which rank holds which expert, and which of several copies computes a token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from ktk import _core


@dataclass(frozen=True)
class Placement:
    """The experts of each rank.

    Attributes
    ----------
    num_experts : int
        Of the layer.
    experts : tuple of tuples of int
        Of each rank, ascending. An expert may be on several ranks.

    Raises
    ------
    ValueError
        An expert is on no rank, or there is no such expert.
    """

    num_experts: int
    experts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = tuple(tuple(sorted({int(e) for e in one})) for one in self.experts)
        object.__setattr__(self, "experts", held)
        known = {expert for one in held for expert in one}
        if wrong := sorted(known - set(range(self.num_experts))):
            raise ValueError(f"a rank is to hold expert {wrong[0]}, of {self.num_experts}")
        if missing := sorted(set(range(self.num_experts)) - known):
            raise ValueError(f"no rank holds expert {missing[0]} of {self.num_experts}")

    @classmethod
    def contiguous(cls, num_experts: int, ranks: int) -> Placement:
        """Give each rank a range of experts, of sizes that differ by at most one."""
        _check_ranks(ranks)
        cuts = [num_experts * rank // ranks for rank in range(ranks + 1)]
        return cls(num_experts, tuple(tuple(range(*ends)) for ends in pairwise(cuts)))

    @classmethod
    def balanced(cls, counts: Sequence[float], ranks: int, *, replicas: int = 0) -> Placement:
        """Divide experts so that ranks are used about equally, and hold about as many.

        Parameters
        ----------
        counts : sequence of float [num_experts]
            How often each expert was used: tokens that were routed to it.
        ranks : int
        replicas : int
            Further copies in all. They are made of the experts that are used most, each on another
            rank, and share their tokens. Memory for each rank is that of
            ceil((num_experts + replicas) / ranks) experts.
        """
        _check_ranks(ranks)
        load = np.asarray(counts, dtype=np.float64)
        if load.ndim != 1 or not load.size or not np.isfinite(load).all() or (load < 0).any():
            raise ValueError("counts must be one number from 0 on for each expert")
        most = load.size * (ranks - 1)
        if not 0 <= replicas <= most:
            raise ValueError(
                f"replicas must be from 0 to {most}, one copy of an expert on each of {ranks} "
                f"ranks, got {replicas}"
            )
        copies = np.ones(load.size, dtype=np.int64)
        for _ in range(replicas):
            share = np.where(copies < ranks, load / copies, -1.0)
            copies[share.argmax()] += 1
        return cls(load.size, _divide(load, copies, ranks))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.experts)

    @cached_property
    def holders(self) -> np.ndarray:
        """Which ranks hold an expert, uint8 [num_experts, ranks]."""
        held = np.zeros((self.num_experts, self.ranks), dtype=np.uint8)
        for rank, one in enumerate(self.experts):
            held[list(one), rank] = 1
        return held

    def parts(self, ids: np.ndarray, home: int | None) -> dict[int, Part]:
        """Return what each rank computes of tokens; ranks without any are left out.

        Of an expert's copies, that one is taken whose rank has the fewest experts of this token;
        among equals the rank where the token is, then the lowest. So the choice depends on nothing
        but the token's own experts and its rank. The lowest rank that computes an expert of a token
        adds its zero experts; if none does, the rank where it is, or the first one.

        Parameters
        ----------
        ids : array of int32 [tokens, k]
            -1 names no expert; numbers from num_experts on are of zero experts.
        home : int or None
            The rank where the tokens are; None if they are on all ranks.
        """
        divided = _core.divide_tokens(ids, self.holders, -1 if home is None else home)
        return {rank: Part(rows, kept) for rank, rows, kept in divided}


@dataclass(frozen=True, slots=True)
class Part:
    """The tokens that have an expert on one rank.

    Attributes
    ----------
    rows : array of int64, or None
        Which tokens, ascending; None for all of them, or nearly all and the others, too.
    ids : array of int32 [rows, k]
        -1 in place of experts that other ranks compute.
    """

    rows: np.ndarray | None
    ids: np.ndarray


def _check_ranks(ranks: Any) -> None:
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")


def _divide(load: np.ndarray, copies: np.ndarray, ranks: int) -> tuple[tuple[int, ...], ...]:
    """Place copies on ranks: the most used first, each on the least used rank that has room."""
    room = -(-int(copies.sum()) // ranks)
    held: list[set[int]] = [set() for _ in range(ranks)]
    used = np.zeros(ranks)
    share = load / copies
    order = np.lexsort((np.arange(load.size), -share, -copies))
    for expert in map(int, order):
        for _ in range(int(copies[expert])):
            free = [r for r in range(ranks) if expert not in held[r] and len(held[r]) < room]
            if not free:
                free = [_make_room(expert, held, used, share, room)]
            rank = min(free, key=lambda r: (used[r], len(held[r]), r))
            held[rank].add(expert)
            used[rank] += share[expert]
    _exchange(held, used, share)
    return tuple(tuple(sorted(one)) for one in held)


def _exchange(held: list[set[int]], used: np.ndarray, share: np.ndarray) -> None:
    """Exchange experts of the most used rank for less used ones of others, while that helps."""
    for _ in range(4 * share.size):
        most = int(used.argmax())
        best = (used[most] * (1 - 1e-9), -1, -1, -1)
        for other in range(len(held)):
            mine, its = (
                np.array(sorted(held[a] - held[b]), dtype=np.int64)
                for a, b in ((most, other), (other, most))
            )
            if not mine.size or not its.size:
                continue
            less = share[mine][:, None] - share[its]
            worse = np.maximum(used[most] - less, used[other] + less)
            row, column = divmod(int(worse.argmin()), its.size)
            found = (float(worse[row, column]), other, int(mine[row]), int(its[column]))
            best = min(best, found)
        _, other, first, second = best
        if other < 0:
            return
        for rank, gone, come in ((most, first, second), (other, second, first)):
            held[rank].remove(gone)
            held[rank].add(come)
            used[rank] += share[come] - share[gone]


def _make_room(
    expert: int, held: list[set[int]], used: np.ndarray, share: np.ndarray, room: int
) -> int:
    """Move an expert away from a full rank that lacks `expert`; return that rank."""
    full = next(r for r, one in enumerate(held) if expert not in one)
    target = next(r for r, one in enumerate(held) if len(one) < room)
    moved = min(held[full] - held[target], key=lambda e: (share[e], e))
    for rank, sign in ((full, -1), (target, 1)):
        (held[rank].discard if sign < 0 else held[rank].add)(moved)
        used[rank] += sign * share[moved]
    return full
