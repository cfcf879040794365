"""A call in which each rank has tokens of its own.

Tokens go to the ranks that hold their experts, and sums come back. In chunks: while a chunk is
computed, the next one is on its way there and the sums of the last one on their way back.

    chunk 0   send | compute | sums back
    chunk 1          send    | compute   | sums back
"""

from __future__ import annotations

import numpy as np
import torch

from ktk.distributed.frames import DTYPES, Header, Kind, view
from ktk.distributed.placement import Part
from ktk.distributed.rows import Batch, add_up, packed_rows, rows_of, unpacked_rows
from ktk.distributed.step import Step, Work


def call_split(work: Work, step: Step, out: torch.Tensor) -> None:
    """Compute a call, and write this rank's tokens to `out`."""
    Split(work, step, out).run()


class Split:
    """The state of a call."""

    def __init__(self, work: Work, step: Step, out: torch.Tensor) -> None:
        self.work = work
        self.step = step
        self.out = out
        self.parts: dict[int, dict[int, Part]] = {}  # by chunk and rank
        self.sums: dict[int, dict[int, np.ndarray]] = {}  # likewise; what others get, then sent

    def run(self) -> None:
        """Send, compute and add up all chunks."""
        work, step = self.work, self.step
        batch = self.exchange(0, None)
        rounds = max(-(-header.tokens // work.chunk) for header in step.first.values())
        for chunk in range(rounds):
            sums = None if batch is None else batch.sums()
            following = chunk + 1 if chunk + 1 < rounds else None
            last = chunk - 1 if chunk else None
            if following is None and last is None:
                if batch is not None and sums is not None:
                    batch.compute(work.moe, sums)
                behind = None
            else:
                ticket = None
                if batch is not None and sums is not None:
                    ticket = batch.submit(work.moe, sums)
                behind = self.exchange(following, last, spin=ticket is None)
                if ticket is not None:
                    ticket.wait()
            self.sums[chunk] = {} if batch is None or sums is None else batch.divide(sums)
            batch = behind
        if rounds:
            self.exchange(None, rounds - 1)

    def exchange(self, there: int | None, back: int | None, *, spin: bool = True) -> Batch | None:
        """Send tokens of a chunk, and sums of another, and receive both.

        Returns
        -------
        Batch or None
            What this rank has to compute of chunk `there`.
        """
        work, step, rank = self.work, self.step, self.work.rank
        tokens, width = step.tokens, work.width
        begin, end = 0, 0
        if there is not None:
            begin, end = (min(tokens.count, at * work.chunk) for at in (there, there + 1))
            ids = tokens.ids[begin:end]
            self.parts[there] = work.placement.parts(ids, rank)
        outgoing: dict[int, list[bytes | memoryview]] = {other: [] for other in work.mesh.others}
        for other, frames in outgoing.items():
            if there is not None:
                part = self.parts[there].get(other)
                body = [] if part is None else packed_rows(rows_of(part, tokens, begin, end))
                rows = 0 if part is None else len(part.ids)
                frames += step.frame(Kind.TOKENS, body, rows, there)
            if back is not None:
                sums = self.sums[back].get(other)
                body = [] if sums is None else [view(sums)]
                frames += step.frame(Kind.PARTIAL, body, 0 if sums is None else len(sums), back)
        received = step.exchange(outgoing, (there is not None) + (back is not None), spin=spin)
        if back is not None:
            self.add_up(back, {other: frames[-1] for other, frames in received.items()})
        if there is None:
            return None
        parts = {}
        for other, ((header, data), *_) in received.items():
            if header.rows:
                dtype = DTYPES[header.dtype]
                parts[other] = unpacked_rows(data, header.rows, header.k, width, dtype)
        if (mine := self.parts[there].get(rank)) is not None:
            parts[rank] = rows_of(mine, tokens, begin, end)
        return Batch.of(parts)

    def add_up(self, chunk: int, received: dict[int, tuple[Header, np.ndarray]]) -> None:
        """Add up what ranks computed for the tokens of a chunk, in their order."""
        work = self.work
        mine = self.sums.pop(chunk)
        parts = self.parts.pop(chunk)
        begin = min(len(self.out), chunk * work.chunk)
        each = []
        for other, part in sorted(parts.items()):
            if other == work.rank:
                sums = mine[other]
            else:
                sums = received[other][1].view(np.float32).reshape(-1, work.width)
            each.append((part.rows, sums))
        add_up(each, self.out[begin : begin + work.chunk])
