"""What does not go together is said on all ranks, and the next call may be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from layers import EXPERTS, ZERO_EXPERTS, layer, tokens, write_checkpoint
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


def alone(rank: int, size: int, say: Any, folder: str) -> Sentences:
    """Let rank 1 fail before ranks compare anything."""
    other = rank == 1
    placement = Placement.contiguous(EXPERTS, size)
    mine = layer(placement.experts[rank])
    wrong: Any = 3 if other else None
    half: Any = 2.5 if other else 4
    text: Any = "5" if other else 5
    load = ExpertParallel.from_checkpoint
    found = {
        "moe": lambda: ExpertParallel(wrong or mine),
        "chunk": lambda: ExpertParallel(mine, chunk=half),
        "timeout": lambda: ExpertParallel(mine, timeout=text),
        "placement": lambda: ExpertParallel(mine, placement=wrong),
        "file": lambda: load(f"{folder}/none" if other else folder, 0, "BF16"),
        "backend": lambda: load(folder, 0, "none" if other else "BF16", placement=placement),
        "ranks": lambda: load(
            folder, 0, "BF16", placement=Placement.contiguous(EXPERTS, 1) if other else placement
        ),
        "chunk of a file": lambda: load(folder, 0, "BF16", chunk=half),
    }
    said = {name: sentence(call) for name, call in found.items()}
    divided = load(folder, 0, "BF16", timeout=100)  # all is well again
    hidden, ids, weights = tokens(4, rank)
    assert torch.isfinite(divided(hidden, ids.clamp(max=EXPERTS - 1), weights)).all()
    return said


@pytest.mark.slow
def test_an_error_of_one_rank_is_told_to_the_others(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    first, second = run(2, alone, str(tmp_path))
    for name, expected in {
        "moe": "TypeError: moe must be a ktk.MoE, got 3",
        "chunk": "TypeError: chunk must be an integer, got 2.5",
        "timeout": "TypeError: timeout must be seconds or a timedelta, got '5'",
        "placement": "TypeError: placement must be a Placement, got 3",
        "file": "CheckpointError: ",
        "backend": "BackendNotFound: ",
        "ranks": "ValueError: placement has 1 ranks, and the group 2",
        "chunk of a file": "TypeError: chunk must be an integer, got 2.5",
    }.items():
        assert second[name].startswith(expected), second[name]
        assert first[name] == f"ValueError: rank 1: {second[name]}"
