"""Divided layers return what one process does, in one order of addition."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from layers import EXPERTS, TOP_K, in_order_of_ranks, layer, tokens, write_checkpoint
from ranks import run

from ktk.distributed import ExpertParallel, Placement, connect

# Tokens of each rank in a call. A chunk is 8 tokens.
COUNTS = [(3, 5, 1), (0, 0, 4), (0, 0, 0), (1, 0, 0), (20, 3, 0), (8, 9, 40)]
USES = [1.0] * 4 + [30.0] + [0.5] * 7
PLACEMENTS = [
    Placement.contiguous(EXPERTS, 3),
    Placement.balanced(USES, 3, replicas=4),
    # One rank holds nothing.
    Placement(EXPERTS, (tuple(range(5)), (), tuple(range(5, EXPERTS)))),
]
U = 2.0**-24


def split(rank: int, size: int, say: Any) -> None:
    whole = layer()
    for number, placement in enumerate(PLACEMENTS):
        mine = layer(placement.experts[rank])
        divided = ExpertParallel(mine, placement=placement, chunk=8, timeout=100)
        for seed, counts in enumerate(COUNTS):
            for dtype in (torch.bfloat16, torch.float32):
                call = tokens(counts[rank], 100 * number + 10 * seed + rank, dtype)
                expected = in_order_of_ranks(whole, placement, rank, call)
                result = divided(*call)
                assert result.dtype == dtype
                assert torch.equal(result, expected), (number, counts, dtype)
        out = torch.empty(3, 64)
        call = tokens(3, rank, torch.float32)
        assert divided(*call, out=out) is out
        assert torch.equal(out, in_order_of_ranks(whole, placement, rank, call))


@pytest.mark.slow
def test_tokens_of_each_rank() -> None:
    run(3, split)


def shared(rank: int, size: int, say: Any) -> list[bytes]:
    whole, results = layer(), []
    for placement in PLACEMENTS:
        divided = ExpertParallel(
            layer(placement.experts[rank]), placement=placement, shared=True, chunk=16, timeout=100
        )
        # From 12 tokens on, each of three ranks adds up a slice.
        for count in (1, 0, 2, 11, 12, 16, 17, 45):
            call = tokens(count, count)
            result = divided(*call)
            assert torch.equal(result, in_order_of_ranks(whole, placement, None, call)), count
            results.append(result.float().numpy().tobytes())
    return results


@pytest.mark.slow
def test_tokens_that_all_ranks_share() -> None:
    first, *others = run(3, shared)
    assert all(other == first for other in others)


def bound(rank: int, size: int, say: Any) -> None:
    """The result differs from one process by rounding of sums alone.

    Either adds up at most k products w_e y_e, which carry a rounding each, in some order: with
    gamma_n = n u / (1 - n u), the error of a sum of n terms is at most gamma_{n - 1} times the sum
    of their magnitudes, whatever the order.
    """
    placement = PLACEMENTS[1]
    whole = layer()
    divided = ExpertParallel(layer(placement.experts[rank]), placement=placement, timeout=100)
    hidden, ids, weights = tokens(50, rank, torch.float32)
    difference = (divided(hidden, ids, weights) - whole(hidden, ids, weights)).abs()
    size_of_terms = torch.zeros(hidden.shape)
    for column in range(TOP_K):
        term = whole(hidden, ids[:, column : column + 1], weights[:, column : column + 1])
        size_of_terms += term.abs()
    n = TOP_K + 1
    gamma = n * U / (1 - n * U)
    # Twice, for either; the magnitudes were added up with an error of their own.
    assert (difference <= 2 * gamma * size_of_terms * (1 + gamma)).all()
    assert difference.max() > 0  # another order, and not by chance the same


@pytest.mark.slow
def test_bound_of_rounding() -> None:
    run(2, bound_of_two)


def bound_of_two(rank: int, size: int, say: Any) -> None:
    global PLACEMENTS
    PLACEMENTS = [PLACEMENTS[0], Placement.balanced(USES, 2, replicas=3)]
    bound(rank, size, say)


def files(rank: int, size: int, say: Any, folder: str) -> tuple[int, int]:
    from ktk.unread import Unread

    read, preadv, left_to_workers = 0, os.preadv, Unread.add

    def counting(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal read
        count = preadv(descriptor, buffers, offset)
        read += count
        return count

    def noting(self: Unread, file: Any, begin: int, memory: Any) -> None:
        nonlocal read
        read += memory.size
        left_to_workers(self, file, begin, memory)

    os.preadv = counting  # type: ignore[assignment]
    Unread.add = noting  # type: ignore[method-assign]
    divided = ExpertParallel.from_checkpoint(folder, 0, "AMXINT8", timeout=100)
    os.preadv, Unread.add = preadv, left_to_workers  # type: ignore[method-assign]
    hidden, ids, weights = tokens(9, rank)
    assert divided.moe.loaded == divided.placement.experts[rank]
    result = divided(hidden, ids, weights)
    import ktk

    whole = ktk.MoE.from_checkpoint(folder, 0, "AMXINT8")
    expected = in_order_of_ranks(whole, divided.placement, rank, (hidden, ids, weights))
    assert torch.equal(result, expected)
    # A slot more than the checkpoint has experts, for a second copy of one.
    more = dataclasses.replace(whole.config, num_experts=EXPERTS + 1)
    slots = [*range(EXPERTS), 0]
    copied = ExpertParallel.from_checkpoint(
        folder, 0, "AMXINT8", config=more, physical_to_logical_map=slots, timeout=100
    )
    assert copied.moe.loaded == Placement.contiguous(EXPERTS + 1, size).experts[rank]
    return read, os.path.getsize(f"{folder}/model.safetensors")


@pytest.mark.slow
def test_a_rank_reads_its_experts_only(tmp_path: Path) -> None:
    intermediate = 1024  # so that headers and configuration are small beside an expert
    write_checkpoint(tmp_path, intermediate)
    one = 3 * 2 * 64 * intermediate
    for (read, size), experts in zip(run(2, files, str(tmp_path)), (6, 6), strict=True):
        assert size > EXPERTS * one
        assert experts * one <= read < (experts + 1) * one


def over_tcp(rank: int, size: int, say: Any) -> None:
    os.environ["KTK_ADDRESS"] = "127.0.0.1"
    connect.machine = lambda: str(rank)  # so that each seems to be another one
    placement = Placement.contiguous(EXPERTS, size)
    divided = ExpertParallel(layer(placement.experts[rank]), timeout=100)
    families = {peer.socket.family for peer in divided._work.mesh._peers.values()}
    assert families == {socket.AF_INET}
    whole = layer()
    for count in (1, 200):
        call = tokens(count + rank, count)
        assert torch.equal(divided(*call), in_order_of_ranks(whole, placement, rank, call))


@pytest.mark.slow
def test_machines() -> None:
    run(3, over_tcp)
