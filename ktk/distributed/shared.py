"""A call in which all ranks have the same tokens, as in tensor parallelism.

Nothing has to be sent before a rank computes its experts. Of few tokens each rank sends its sums to
all, which is one exchange. Of many, each rank adds up a slice of the tokens and sends what becomes
of them to all, which is fewer bytes. Both add in the same order: all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ktk.distributed.frames import Kind, view
from ktk.distributed.placement import Part
from ktk.distributed.rows import Batch, add_up, rows_of
from ktk.distributed.step import Received, Step, Work
from ktk.ticket import Ticket

# From so many tokens for each rank on, bytes count for more than a further exchange.
_SLICED = 4


def call_shared(work: Work, step: Step, out: torch.Tensor) -> None:
    """Compute a call, and write all tokens to `out`."""
    count = step.tokens.count
    rounds = max(1, -(-count // work.chunk))
    done = _Chunk.start(work, step, 0)
    done.compute(work)
    for number in range(rounds):
        following = _Chunk.start(work, step, number + 1) if number + 1 < rounds else None
        ticket = None if following is None else following.submit(work)
        done.finish(work, step, out, spin=ticket is None)
        if ticket is not None:
            ticket.wait()
        if following is not None:
            done = following


@dataclass
class _Chunk:
    """A range of the tokens, and the sums that this rank computes of its experts."""

    number: int
    begin: int
    end: int
    parts: dict[int, Part]
    batch: Batch | None
    sums: np.ndarray

    @classmethod
    def start(cls, work: Work, step: Step, number: int) -> _Chunk:
        tokens = step.tokens
        begin, end = (min(tokens.count, at * work.chunk) for at in (number, number + 1))
        ids = tokens.ids[begin:end]
        parts = work.placement.parts(ids, None)
        mine = parts.get(work.rank)
        batch = None if mine is None else Batch.of({work.rank: rows_of(mine, tokens, begin, end)})
        sums = np.empty((0, work.width), np.float32) if batch is None else batch.sums()
        return cls(number, begin, end, parts, batch, sums)

    def compute(self, work: Work) -> None:
        if self.batch is not None:
            self.batch.compute(work.moe, self.sums)

    def submit(self, work: Work) -> Ticket | None:
        return None if self.batch is None else self.batch.submit(work.moe, self.sums)

    def finish(self, work: Work, step: Step, out: torch.Tensor, *, spin: bool) -> None:
        """Send sums and results, receive those of others, and write the chunk to `out`."""
        count, size = self.end - self.begin, work.mesh.size
        target = out if count == len(out) else out[self.begin : self.end]
        if count < _SLICED * size:
            frame = step.frame(Kind.PARTIAL, [view(self.sums)], len(self.sums), self.number)
            received = step.exchange(dict.fromkeys(work.mesh.others, frame), 1, spin=spin)
            add_up(self.received(work, received, slice(0, count)), target)
            return
        # Of each rank: the tokens whose sums it adds up.
        slices = [slice(count * r // size, count * (r + 1) // size) for r in range(size)]
        mine = self.parts.get(work.rank)
        outgoing = {}
        for other in work.mesh.others:
            sums = self.sums[_within(mine, slices[other])] if mine else self.sums
            outgoing[other] = step.frame(Kind.PARTIAL, [view(sums)], len(sums), self.number)
        received = step.exchange(outgoing, 1, spin=spin)
        own = slices[work.rank]
        add_up(self.received(work, received, own), target[own])
        frame = step.frame(Kind.RESULT, [view(target[own])], own.stop - own.start, self.number)
        results = step.exchange(dict.fromkeys(work.mesh.others, frame), 1, spin=spin)
        for rank, [(_, data)] in results.items():
            target[slices[rank]] = torch.from_numpy(data).view(out.dtype).view(-1, work.width)

    def received(
        self, work: Work, received: Received, tokens: slice
    ) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
        """Yield the sums of each rank for a range of the chunk, and which tokens they are of."""
        for rank, part in self.parts.items():
            kept = _within(part, tokens)
            rows = None if part.rows is None else part.rows[kept] - tokens.start
            if rank == work.rank:
                yield rows, self.sums[kept]
                continue
            [(header, data)] = received[rank]
            if header.rows != kept.stop - kept.start:
                raise RuntimeError(
                    f"rank {rank} has other experts for the same tokens than rank {work.rank}: "
                    "ranks that share their tokens have to route them alike"
                )
            yield rows, data.view(np.float32).reshape(-1, work.width)


def _within(part: Part, rows: slice) -> slice:
    """Return which rows of a part are in a range of the chunk."""
    if part.rows is None:
        return rows
    return slice(*np.searchsorted(part.rows, [rows.start, rows.stop]).tolist())
