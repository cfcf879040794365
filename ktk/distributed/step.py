"""What both ways of a call have in common: frames of a call, and what ranks have to agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ktk.distributed.call import Tokens, disagreement
from ktk.distributed.frames import Header, Kind, view
from ktk.distributed.mesh import Mesh
from ktk.distributed.placement import Placement
from ktk.moe import MoE

#: Headers and bytes of the frames of an exchange, by rank, in the order they were sent in.
Received = dict[int, list[tuple[Header, np.ndarray]]]
_TYPES: tuple[type[Exception], ...] = (ValueError, TypeError, RuntimeError)


class Refused(Exception):
    """A call that all ranks refuse for the same reason.

    Attributes
    ----------
    reason
        What all raise.
    """

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason


@dataclass(frozen=True)
class Work:
    """A divided layer, as its calls need it; attributes as of `ExpertParallel`."""

    moe: MoE
    mesh: Mesh
    placement: Placement
    chunk: int
    timeout: float
    shared: bool

    @property
    def rank(self) -> int:
        """Of this process."""
        return self.mesh.rank

    @property
    def width(self) -> int:
        """hidden_size."""
        return self.moe.config.hidden_size


@dataclass
class Step:
    """One call.

    Attributes
    ----------
    work
        The layer.
    tokens
        Of this rank; none in a call that it refuses.
    header
        What all frames of the call have in common.
    problem
        Why this rank refuses the call, if it does.
    first
        The first header of each rank.
    """

    work: Work
    tokens: Tokens
    header: Header
    problem: Exception | None = None
    first: dict[int, Header] = field(default_factory=dict)

    def frame(
        self, kind: Kind, body: list[memoryview], rows: int, round_: int
    ) -> list[bytes | memoryview]:
        """Return a header and what is behind it; in a call that is refused, why."""
        if self.problem is not None:
            kind = Kind.ERROR
            at = next((i for i, one in enumerate(_TYPES) if isinstance(self.problem, one)), 0)
            body = [memoryview(f"{at}{self.problem}".encode())]
        one = self.header
        nbytes = sum(map(len, body))
        header = Header(
            *(kind, one.layer, round_, one.tokens, rows, one.k, one.dtype, one.width),
            nbytes,
        )
        return [header.pack(), *body]

    def exchange(
        self, outgoing: Mapping[int, list[bytes | memoryview]], frames: int, *, spin: bool = True
    ) -> Received:
        """Send and receive frames; in the first exchange of a call ranks may refuse it.

        Raises
        ------
        Refused
            A rank refuses the call, or ranks disagree. All raise this.
        RankFailed
        """
        received: Received = {other: [] for other in outgoing}

        def accept(rank: int, header: Header) -> memoryview:
            data = np.empty(header.nbytes, np.uint8)
            received[rank].append((header, data))
            return view(data)

        work = self.work
        work.mesh.exchange(outgoing, frames, accept, timeout=work.timeout, spin=spin)
        if not self.first:
            self._agree(received)
        return received

    def _agree(self, received: Received) -> None:
        work = self.work
        problems = {} if self.problem is None else {work.rank: self.problem}
        for other, ((header, data), *_) in received.items():
            if header.kind == Kind.ERROR:
                text = data.tobytes().decode()
                problems[other] = _TYPES[int(text[0])](text[1:])
        if problems:
            text = "; ".join(f"rank {rank}: {error}" for rank, error in sorted(problems.items()))
            first = problems[min(problems)]
            raise Refused(next((one for one in _TYPES if isinstance(first, one)), ValueError)(text))
        headers = {other: frames[0][0] for other, frames in received.items()}
        if text := disagreement(self.header, work.rank, headers, count=work.shared):
            raise Refused(ValueError(text))
        self.first = {**headers, work.rank: self.header}
