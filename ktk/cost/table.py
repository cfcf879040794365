"""Measured times of a layer, and what they say of any call.

    seconds = call(largest R) + (tokens - T(R)) * token_seconds + sum over experts of expert(rows)

`expert` and `call` are tables over rows, measured at a few numbers of them (the *points*) and
interpolated between: what one more expert with so many rows takes when all workers share the
experts, and what a call takes on top: waking workers, encoding tokens, reading nothing ahead of the
first expert, and the sums. A call that measures R rows has T(R) tokens; `token_seconds` is for
tokens that are more than these, whose experts are computed elsewhere.

With few rows an expert takes as long as reading its weights from memory, which is not the same from
one minute to the next on machines that others share. So an expert's time is that of what is slower:

    expert(rows) = max(slowdown * read, rows * row) + the rest, as measured

where `read` is the time with one row, and `row` that of each of many rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.durable import write_file
from ktk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_FORMAT, _VERSION = "ktk.cost", 1
# No machine reads so much faster or slower than it did.
_LEAST_SLOWDOWN, _MOST_SLOWDOWN = 0.2, 5.0
# A call tells the slowdown if memory that is slower by a tenth makes it slower by more than this.
_TELLING = 0.05


def measured_tokens(rows: int) -> int:
    """Return T(R): the tokens of the call that measures experts with so many rows.

    One token alone, as when text is generated; of several every other one, because the rows of an
    expert are scattered.
    """
    return 1 if rows == 1 else 2 * rows


@dataclass(frozen=True)
class CostTable:
    """Measured times of layers that are alike. Plain data: picklable, and a file of JSON.

    Attributes
    ----------
    layer : mapping
        What was measured: backend, variant, formats, sizes, threads, shards and CPU. A table is
        for layers of which all of this is the same.
    rows : tuple of int
        The points, ascending from 1.
    expert_seconds : tuple of float
        For each point, seconds of one more expert that has so many rows.
    call_seconds : tuple of float
        For each point, seconds of a call on top, where the expert with the most rows has so many.
    token_seconds : float
        Seconds of a token whose experts are all computed elsewhere.
    """

    layer: Mapping[str, Any]
    rows: tuple[int, ...]
    expert_seconds: tuple[float, ...]
    call_seconds: tuple[float, ...]
    token_seconds: float

    def __post_init__(self) -> None:
        counts = {len(self.rows), len(self.expert_seconds), len(self.call_seconds)}
        if len(counts) != 1 or len(self.rows) < 2:
            raise ValueError("a table has two or more points, and two times for each of them")
        if list(self.rows) != sorted(set(self.rows)) or self.rows[0] != 1:
            raise ValueError("points must be numbers of rows, ascending from 1")
        times = (*self.expert_seconds, *self.call_seconds, self.token_seconds)
        if not all(0 <= time < float("inf") for time in times) or not all(self.expert_seconds):
            raise ValueError("times must be numbers from 0 on, and those of experts above 0")

    def seconds(
        self, rows_per_expert: Any, tokens: int | None = None, memory_slowdown: float = 1.0
    ) -> float:
        """Predict the seconds of a call; parameters as of :meth:`ktk.MoE.cost`."""
        import numpy as np

        rows = row_counts(rows_per_expert)
        if not memory_slowdown > 0:
            raise ValueError(f"memory_slowdown must be above 0, got {memory_slowdown!r}")
        most, total = int(rows.max(initial=0)), int(rows.sum())
        least = max(most, -(-total // self.layer["num_experts_per_tok"]))
        tokens = least if tokens is None else tokens
        if tokens < most:
            raise ValueError(f"an expert has {most} rows of {tokens} tokens: a token is one row")
        if most == 0:
            return tokens * self.token_seconds
        experts = self._interpolate(rows[rows > 0], self._expert_seconds(memory_slowdown)).sum()
        call = float(self._interpolate(np.array([most]), np.array(self.call_seconds))[0])
        more = (tokens - measured_tokens(most)) * self.token_seconds
        return float(experts) + max(call + more, 0.0)

    def memory_slowdown(
        self, rows_per_expert: Any, seconds: float, tokens: int | None = None
    ) -> float | None:
        """Say how much slower memory is read than when the table was measured.

        Parameters
        ----------
        rows_per_expert, tokens
            Of a call that was just made: of a generated token, say.
        seconds : float
            What it took.

        Returns
        -------
        float or None
            `memory_slowdown` of :meth:`ktk.MoE.cost` that explains the time. None: mostly
            arithmetic, which says nothing about memory.
        """

        def predicted(slowdown: float) -> float:
            return self.seconds(rows_per_expert, tokens, slowdown)

        if predicted(1.1) < (1 + _TELLING) * predicted(1.0):
            return None
        low, high = _LEAST_SLOWDOWN, _MOST_SLOWDOWN
        for _ in range(30):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if predicted(middle) < seconds else (low, middle)
        return float((low * high) ** 0.5)

    def _expert_seconds(self, slowdown: float) -> npt.NDArray[np.float64]:
        """Return the times of experts at the points; none is shorter than that of fewer rows."""
        import numpy as np

        measured = np.array(self.expert_seconds)
        arithmetic = np.array(self.rows) * (measured[-1] / self.rows[-1])
        more = memory_difference(measured[0], arithmetic, slowdown)
        # What memory saves can be no more than all there is.
        floor = np.minimum(measured, slowdown * measured)
        return np.maximum.accumulate(np.maximum(measured + more, floor))

    def _interpolate(
        self, rows: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Return times between the points, and beyond the last one by its rows' share."""
        import numpy as np

        found = np.interp(rows, self.rows, times)
        return np.where(rows > self.rows[-1], times[-1] * (rows / self.rows[-1]), found)

    def save(self, path: str | Path) -> None:
        """Write a file, which appears as a whole or not at all.

        Raises
        ------
        CheckpointError
            It cannot be written.
        """
        head = {"format": _FORMAT, "version": _VERSION}
        data = json.dumps(head | asdict(self) | {"layer": dict(self.layer)}, indent=1)
        try:
            write_file(Path(path), f"{data}\n".encode())
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error

    @classmethod
    def load(cls, path: str | Path) -> CostTable:
        """Read a file that `save` wrote.

        Raises
        ------
        CheckpointError
            It is missing, damaged, of another kind or of a newer ktk.
        """
        from ktk.checkpoint.entries import EntryError, integer, number, table
        from ktk.checkpoint.files import read_json

        path = Path(path)
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        document = read_json(path)
        if document.get("format") != _FORMAT:
            found = document.get("format")
            raise CheckpointError(f"{path} is no file of {_FORMAT}: its format is {found!r}")
        if document.get("version") != _VERSION:
            raise CheckpointError(
                f"{path} has version {document.get('version')!r} of {_FORMAT}, this ktk reads "
                f"{_VERSION}"
            )
        try:
            layer = table("layer", document.get("layer"))
            integer("num_experts_per_tok", layer.get("num_experts_per_tok"), 1)
            return cls(
                layer=layer,
                rows=tuple(integer("rows", one, 1) for one in _list(document, "rows")),
                expert_seconds=tuple(
                    number("expert_seconds", one) for one in _list(document, "expert_seconds")
                ),
                call_seconds=tuple(
                    number("call_seconds", one) for one in _list(document, "call_seconds")
                ),
                token_seconds=number("token_seconds", document.get("token_seconds")),
            )
        except (EntryError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from error


def _list(document: Mapping[str, Any], name: str) -> Sequence[Any]:
    found = document.get(name)
    if not isinstance(found, list):
        raise ValueError(f"{name} must be a list, got {found!r}")
    return found


def memory_difference(read: float, arithmetic: Any, slowdown: float) -> Any:
    """Return how many seconds longer experts take where memory is slower than as measured.

    Parameters
    ----------
    read : float
        Seconds that reading an expert's weights takes, as measured.
    arithmetic : array
        Seconds that the arithmetic of each expert takes.
    slowdown : float
    """
    import numpy as np

    return np.maximum(slowdown * read, arithmetic) - np.maximum(read, arithmetic)


def row_counts(rows_per_expert: Any) -> npt.NDArray[np.int64]:
    """Return rows of experts as an array, or raise a ValueError for what are no numbers of rows."""
    import numpy as np

    given = np.asarray(rows_per_expert)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise ValueError(
            f"rows_per_expert must be a list of integers, got {given.dtype} of shape {given.shape}"
        )
    if given.size and given.min() < 0:
        raise ValueError(f"rows_per_expert has {given.min()} rows for expert {given.argmin()}")
    return given.astype(np.int64)
