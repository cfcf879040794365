"""What does not go together is one sentence on all ranks, and the next call may be right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layers import EXPERTS, ZERO_EXPERTS, layer, tokens
from ranks import run

from ktk.distributed import ExpertParallel, Placement

Sentences = dict[str, str]


def sentence(call: Any) -> str:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def calls(rank: int, size: int, say: Any) -> Sentences:
    placement = Placement.contiguous(EXPERTS, size)
    divided = ExpertParallel(layer(placement.experts[rank]), timeout=100)
    hidden, ids, weights = tokens(4, rank)
    wrong = {
        "width": (hidden[:, :32], ids, weights),
        "dtype": (hidden.double(), ids, weights),
        "rows": (hidden, ids[:3], weights),
        "range": (hidden, torch.full_like(ids, EXPERTS + ZERO_EXPERTS), weights),
        "ids": (hidden, ids.float(), weights),
        "no tensor": (hidden.float().numpy(), ids, weights),
        "gradient": (hidden.float().requires_grad_(), ids, weights),
        "k of ranks": (hidden, ids[:, :2], weights[:, :2]),
        "dtype of ranks": (hidden.float(), ids, weights),
    }
    found = {}
    for name, arguments in wrong.items():
        given = arguments if rank == 1 else (hidden, ids, weights)
        found[name] = sentence(lambda given=given: divided(*given))
    shared = ExpertParallel(layer(placement.experts[rank]), shared=True, timeout=100)
    found["count"] = sentence(lambda: shared(*tokens(4 + rank, 0)))
    found["order"] = sentence(lambda: (shared if rank else divided)(*tokens(4, 0)))
    assert torch.isfinite(divided(hidden, ids, weights)).all()  # all is well again
    return found


@pytest.mark.slow
def test_calls() -> None:
    first, second = run(2, calls)
    assert first == second
    for name, expected in {
        "width": "ValueError: rank 1: hidden must have shape [tokens, 64], got [4, 32]",
        "dtype": "TypeError: rank 1: hidden must be float32, bfloat16, float16, got float64",
        "rows": "ValueError: rank 1: topk_ids must have shape [4, k], got [3, 3]",
        "range": "ValueError: rank 1: topk_ids has 16, expected 0 <= id < 16, or -1 for no expert",
        "ids": "TypeError: rank 1: topk_ids must be int32, int64, int16, int8, uint8, got float32",
        "no tensor": "TypeError: rank 1: hidden must be a tensor of torch, got ndarray",
        "gradient": "RuntimeError: rank 1: hidden requires grad, but ktk computes inference only",
        "k of ranks": "ValueError: topk_ids has 2 experts for a token on rank 1 and 3 on rank 0",
        "dtype of ranks": "ValueError: hidden is float32 on rank 1 and bfloat16 on rank 0",
        "count": "ValueError: rank 1 has 5 tokens and rank 0 has 4: ranks that share",
        "order": "ValueError: rank 1 calls divided layer 1, and rank 0 layer 0",
    }.items():
        assert first[name].startswith(expected), first[name]


def making(rank: int, size: int, say: Any) -> Sentences:
    other = rank == 1
    halves = Placement.contiguous(EXPERTS, 2)
    mine = layer(halves.experts[rank])
    found = {
        "sizes": lambda: ExpertParallel(layer(intermediate_size=64 if other else 96)),
        "backend": lambda: ExpertParallel(layer(backend="BF16" if other else "AMXINT8")),
        "missing": lambda: ExpertParallel(layer([0, 1]) if other else mine),
        "placement": lambda: ExpertParallel(
            layer(), placement=Placement.balanced(range(EXPERTS), 2) if other else None
        ),
        "ranks": lambda: ExpertParallel(
            mine, placement=Placement.contiguous(EXPERTS, 3 if other else 2)
        ),
        "experts": lambda: ExpertParallel(
            mine, placement=Placement.contiguous(13 if other else EXPERTS, 2)
        ),
        "shared": lambda: ExpertParallel(mine, shared=other),
        "chunk": lambda: ExpertParallel(mine, chunk=0 if other else 4),
        "timeout": lambda: ExpertParallel(mine, timeout=5 if other else 6),
    }
    return {name: sentence(call) for name, call in found.items()}


@pytest.mark.slow
def test_making() -> None:
    first, second = run(2, making)
    assert first == second
    for name, expected in {
        "sizes": "ValueError: rank 1 has intermediate_size 64 and rank 0 has 96",
        "backend": "ValueError: rank 1 has backend BF16 and rank 0 has AMXINT8",
        "missing": "ValueError: rank 1: expert 6 is this rank's by placement, and is not loaded",
        "placement": "ValueError: rank 1 has placement ((",
        "ranks": "ValueError: rank 1: placement has 3 ranks, and the group 2",
        "experts": "ValueError: rank 1: placement is of 13 experts, and the layer has 12",
        "shared": "ValueError: rank 1 has shared True and rank 0 has False",
        "chunk": "ValueError: rank 1: chunk must be at least 1, got 0",
        "timeout": "ValueError: rank 1 has timeout 5.0 and rank 0 has 6.0",
    }.items():
        assert first[name].startswith(expected), first[name]
