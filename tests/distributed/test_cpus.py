"""Processes of one machine have CPUs of their own, and do not slow each other down."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layers import HIDDEN, INTERMEDIATE, TOP_K, tokens
from ranks import run

import ktk
from ktk.distributed import share_cpus

# A round takes SECONDS per process alone, then SECONDS together. A test that runs beside this
# one takes time from both, unevenly: the best round counts, of as many as a busy machine needs.
ROUNDS, SECONDS, ENOUGH = 20, 0.2, 0.75


def small_layer() -> ktk.MoE:
    """Return a layer that fits any cache, on the pool of the process."""
    moe = ktk.load_backend("AMXINT8").moe(
        num_experts=TOP_K,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
    )
    shapes = ((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    return moe.load(*(torch.randn(TOP_K, *shape) for shape in shapes))


def take_turns(rank: int, size: int, say: Any) -> Any:
    """Return the CPUs, and how much of what each does alone it does while the other computes."""
    used = share_cpus()
    moe = small_layer()
    hidden, ids, weights = tokens(8, 0)
    ids = ids.clamp(max=TOP_K - 1)

    def rate() -> float:
        calls, begin = 0, time.perf_counter()
        while time.perf_counter() < begin + SECONDS:
            moe(hidden, ids, weights)
            calls += 1
        return calls / (time.perf_counter() - begin)

    kept: list[float] = []
    for _ in range(ROUNDS):
        alone = 0.0
        for turn in range(size):
            dist.barrier()
            if turn == rank:
                alone = rate()
        dist.barrier()
        kept.append(rate() / alone)
        worst = torch.tensor(max(kept))
        dist.all_reduce(worst, dist.ReduceOp.MIN)
        if worst > ENOUGH:
            break
    return used, moe.pool.cpus, kept


@pytest.mark.slow
def test_two_processes_do_not_slow_each_other() -> None:
    allowed = os.sched_getaffinity(0)
    if len(allowed) < 2:
        pytest.skip("needs two CPUs")
    (one, one_pool, one_kept), (other, other_pool, other_kept) = run(2, take_turns)
    assert not set(one) & set(other)
    assert set(one) | set(other) == allowed
    assert set(one_pool) <= set(one)
    assert set(other_pool) <= set(other)
    # On one CPU both would have half of what each has alone.
    assert max(one_kept) > ENOUGH
    assert max(other_kept) > ENOUGH
