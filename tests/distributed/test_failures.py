"""A rank that dies or hangs ends in an error that names it, on all others, and never in a hang."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from layers import layer, tokens
from ranks import Ranks

from ktk.distributed import ExpertParallel, Placement, RankFailed

SIZE, VICTIM = 3, 1
TIMEOUT = 8.0


def calling(rank: int, size: int, say: Any, shared: bool) -> tuple[list[int], str, bool]:
    """Call until it fails; return whom that names, how, and whether it stays."""
    placement = Placement.contiguous(12, size)
    divided = ExpertParallel(
        layer(placement.experts[rank]), shared=shared, chunk=64, timeout=TIMEOUT
    )
    call = tokens(300, 0 if shared else rank)
    number = 0
    try:
        while True:
            divided(*call)
            number += 1
            if number == 3:
                say("going")
    except RankFailed as error:
        try:
            divided(*call)
        except RankFailed as again:
            return list(error.ranks), str(error), str(again) == str(error)
    raise AssertionError("a broken group went on")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["split", "shared"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_one_rank_is_gone(how: signal.Signals, shared: bool) -> None:
    with Ranks(SIZE, calling, shared) as ranks:
        for _ in range(SIZE):
            assert ranks.message()[1] == (False, "going")
        time.sleep(0.2)
        pid = ranks.processes[VICTIM].pid
        assert pid is not None
        os.kill(pid, how)
        results = ranks.wait({0, 2})
    for result in results:
        blamed, sentence, stays = result
        assert blamed == [VICTIM], sentence
        assert stays
        # Noticed at once where the process ended, and after the time where it did not.
        assert sentence.startswith(
            "rank 1 ended" if how == signal.SIGKILL else "rank 1 sent nothing for 8 s"
        )


def raising(rank: int, size: int, say: Any) -> str:
    divided = ExpertParallel(layer(Placement.contiguous(12, size).experts[rank]), timeout=60)
    call = tokens(4, rank)
    divided(*call)
    if rank == VICTIM:

        def broken(*_: Any, **__: Any) -> None:
            raise MemoryError("no more")

        type(divided.moe).__call__ = broken  # type: ignore[method-assign]
    try:
        divided(*call)
    except (MemoryError, RankFailed) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.slow
def test_one_rank_raises() -> None:
    with Ranks(SIZE, raising) as ranks:
        results = ranks.wait()
    assert results[VICTIM] == "MemoryError: no more"
    for other in (0, 2):
        assert results[other].startswith("RankFailed: rank 1 raised an error in the middle")


def leaving(rank: int, size: int, say: Any) -> str:
    divided = ExpertParallel(layer(Placement.contiguous(12, size).experts[rank]), timeout=60)
    for _ in range(3):
        divided(*tokens(4, rank))
    if rank == VICTIM:
        return "left"
    try:
        divided(*tokens(4, rank))
    except RankFailed as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
def test_one_rank_ends_before_the_others() -> None:
    with Ranks(SIZE, leaving) as ranks:
        results = ranks.wait()
    for other in (0, 2):
        assert results[other].startswith("rank 1 ended, or closed the connection")
