"""Which rank holds and computes which expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layers import computed_by

from ktk.distributed import Placement


def test_contiguous() -> None:
    assert Placement.contiguous(7, 3).experts == ((0, 1), (2, 3), (4, 5, 6))
    assert Placement.contiguous(2, 3).experts == ((), (0,), (1,))


@given(
    counts=st.lists(st.floats(0, 1e6), min_size=1, max_size=40),
    ranks=st.integers(1, 6),
    data=st.data(),
)
def test_balanced_holds_all_experts_and_no_more(
    counts: list[float], ranks: int, data: st.DataObject
) -> None:
    replicas = data.draw(st.integers(0, len(counts) * (ranks - 1)))
    placement = Placement.balanced(counts, ranks, replicas=replicas)
    held = [expert for one in placement.experts for expert in one]
    assert len(held) == len(counts) + replicas
    assert set(held) == set(range(len(counts)))
    most = -(-len(held) // ranks)
    assert all(len(one) <= most and len(set(one)) == len(one) for one in placement.experts)
    # The longest-processing-time rule: no rank has more than the mean and one share beside it,
    # unless others were full.
    copies = np.bincount(held, minlength=len(counts))
    share = np.asarray(counts) / copies
    if replicas == 0 and len(counts) >= ranks:
        used = [share[list(one)].sum() for one in placement.experts]
        assert max(used) <= share.sum() + 1e-6


def test_balanced_is_better_than_contiguous() -> None:
    counts: Any = 1.0 / np.arange(1, 129)  # Zipf's law
    used = {
        name: max(counts[list(one)].sum() for one in placement.experts) / counts.sum() * 4
        for name, placement in {
            "contiguous": Placement.contiguous(128, 4),
            "balanced": Placement.balanced(counts, 4),
        }.items()
    }
    assert used["contiguous"] > 2.5
    # Slots are as many on each rank, and shares down to 1 / 128 fill gaps.
    assert used["balanced"] < 1.01


def test_copies_are_of_the_experts_that_are_used_most() -> None:
    placement = Placement.balanced([1, 1, 20, 1, 1, 10], 3, replicas=3)
    copies = placement.holders.sum(1, dtype=int)
    assert copies[2] == 3
    assert copies[5] == 2
    assert copies.sum() == 9


def test_copies_share_the_tokens() -> None:
    placement = Placement(4, ((0, 1, 3), (0, 2, 3)))
    ids = np.array([[0, 1], [0, 2], [0, 3], [-1, 0]], np.int32)
    # The rank with fewest experts of the token; among equals its own, then the lowest.
    assert computed_by(placement, ids, 1).tolist() == [[1, 0], [0, 1], [1, 0], [-1, 1]]
    assert computed_by(placement, ids, None).tolist() == [[1, 0], [0, 1], [0, 1], [-1, 0]]


@given(
    ranks=st.integers(1, 5), tokens=st.integers(0, 60), k=st.integers(1, 4), seed=st.integers(0, 99)
)
def test_parts_of_ranks(ranks: int, tokens: int, k: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    counts: Any = random.random(9)
    placement = Placement.balanced(
        counts, ranks, replicas=int(random.integers(0, 9 * (ranks - 1) + 1))
    )
    ids = random.integers(-1, 12, (tokens, k)).astype(np.int32)  # from 9 on: zero experts
    home = int(random.integers(-1, ranks))
    expected = computed_by(placement, ids, None if home < 0 else home)
    parts = placement.parts(ids, None if home < 0 else home)
    assert list(parts) == sorted(set(expected.ravel().tolist()) - {-1})
    for rank, part in parts.items():
        mine = np.where(expected == rank, ids, -1)
        some = np.flatnonzero((mine >= 0).any(1))
        if part.rows is None:
            assert len(some) >= tokens * 15 / 16
            assert (part.ids == mine).all()
        else:
            assert (part.rows == some).all()
            assert (part.ids == mine[some]).all()


def test_messages() -> None:
    for call, sentence in (
        (lambda: Placement(3, ((0, 1), (1,))), "no rank holds expert 2 of 3"),
        (lambda: Placement(3, ((0, 1), (2, 3))), "a rank is to hold expert 3, of 3"),
        (lambda: Placement.contiguous(4, 0), "ranks must be at least 1, got 0"),
        (lambda: Placement.balanced([1, 2], 2, replicas=3), "replicas must be from 0 to 2"),
        (lambda: Placement.balanced([1, float("nan")], 2), "counts must be one number from 0 on"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
