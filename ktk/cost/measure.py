"""Measures the times of a `CostTable`, with random activations and the layer's own weights.

Calls of many experts and of one take turns; the difference is what an expert adds. Before each pair
one row is sent to the same number of experts: it says how fast memory is just now, and times that
wait for memory are converted to the median of that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

from ktk import _core
from ktk.cost.table import CostTable, measured_tokens, memory_difference
from ktk.system import last_level_cache_bytes

#: Numbers of rows that are measured. Kernels take up to 16 rows at once, so they are dense there;
#: beyond 512 a layer takes an expert's rows in pieces of so many.
POINTS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 256, 512)
_ROUNDS = 3
_EXPERTS = 8  # of a call with many
_MANY_TOKENS = 1024


class Layer(Protocol):
    """What is needed of :class:`ktk.MoE`."""

    config: Any

    @property
    def nbytes(self) -> int: ...
    @property
    def loaded(self) -> tuple[int, ...]: ...
    @property
    def pool(self) -> _core.WorkerPool | None: ...
    def __call__(self, hidden: Any, topk_ids: Any, topk_weights: Any, *, out: Any) -> Any: ...


class Clock:
    """Times calls of a layer, each to the experts that were not used for longest."""

    def __init__(self, layer: Layer, time: Callable[[], float]) -> None:
        import numpy as np

        self._layer, self._time = layer, time
        loaded = layer.loaded
        self.experts = min(_EXPERTS, len(loaded))
        # A last turn of fewer experts is filled from the first ones.
        turns = range(0, len(loaded), self.experts)
        self._turns = cycle(
            [[loaded[(first + i) % len(loaded)] for i in range(self.experts)] for first in turns]
        )
        rng = np.random.default_rng(0)
        width = layer.config.hidden_size
        self._hidden = rng.standard_normal((_MANY_TOKENS, width), np.float32).astype(np.float16)
        self._out = np.empty_like(self._hidden)
        # Where all weights fit the cache, something else must take their place, as the layers of a
        # model take each other's. It is read and not written: lines to be written back would share
        # the time of the call. Ones, because zeros that nobody wrote have no memory of their own.
        cache = last_level_cache_bytes()
        self._other = np.ones(2 * cache, np.uint8) if layer.nbytes < 2 * cache else None

    def call(self, experts: int, rows: int, tokens: int | None = None) -> float:
        """Return the seconds of a call in which so many experts have so many rows each."""
        import numpy as np

        if self._other is not None:
            self._other.max()
            self._wake()
        ids = next(self._turns)
        count = measured_tokens(rows) if tokens is None else tokens
        chosen = np.full((count, experts), -1, np.int64)
        for column in range(experts):
            step = 2 if 2 * rows <= count else 1
            chosen[column % step :: step, column][:rows] = ids[column]
        weights = np.full(chosen.shape, 1 / experts, np.float32)
        hidden, out = self._hidden[:count], self._out[:count]
        begin = self._time()
        self._layer(hidden, chosen, weights, out=out)
        return self._time() - begin

    def _wake(self) -> None:
        """Have the workers do something, as they sleep by now, and in a model they would not.

        A call whose tokens choose no expert would not reach them; this reads no weights either.
        """
        row = self._hidden[:1]
        _core.rms_norm(row, row[0], self._out[:1], 1.0, 0.0, False, self._layer.pool)


@dataclass
class _Samples:
    """Seconds of calls of many experts and of one, and of one row beside each."""

    many: list[float]
    one: list[float]
    beside: list[float]


def measure(
    layer: Layer,
    subject: dict[str, Any],
    *,
    points: Sequence[int] = POINTS,
    rounds: int = _ROUNDS,
    time: Callable[[], float] = time.perf_counter,
) -> CostTable:
    """Measure a layer; `subject` becomes the table's `layer`."""
    clock = Clock(layer, time)
    n = clock.experts
    for rows in (points[-1], 1, 1):  # buffers, clock frequency
        clock.call(n, rows)
    samples = {rows: _Samples([], [], []) for rows in points}
    per_token = []
    for _ in range(rounds):
        for rows, found in samples.items():
            found.beside.append(clock.call(n, 1))
            found.many.append(clock.call(n, rows))
            found.one.append(clock.call(1, rows))
        beside = clock.call(n, 1)
        per_token.append((clock.call(n, 1, _MANY_TOKENS) - beside) / (_MANY_TOKENS - 1))
    expert, call = evaluate(samples, n)
    return CostTable(
        layer=subject,
        rows=tuple(points),
        expert_seconds=tuple(expert),
        call_seconds=tuple(call),
        token_seconds=max(statistics.median(per_token), 0.0),
    )


def evaluate(samples: dict[int, _Samples], experts: int) -> tuple[list[float], list[float]]:
    """Return for each point the seconds of an expert, and of a call on top."""
    usual = statistics.median(time for found in samples.values() for time in found.beside)
    slowdowns = {rows: [time / usual for time in found.beside] for rows, found in samples.items()}
    # First guesses: what a call takes on top is little where experts are many or have many rows.
    read = usual / experts
    most = max(samples)
    row = statistics.median(samples[most].many) / experts / most

    def usually(rows: int, times: Sequence[float], count: int) -> float:
        return statistics.median(
            _usual(time, count * float(memory_difference(read, rows * row, slowdown)), slowdown)
            for time, slowdown in zip(times, slowdowns[rows], strict=True)
        )

    expert, call = [], []
    for rows, found in samples.items():
        many, one = usually(rows, found.many, experts), usually(rows, found.one, 1)
        # What one expert takes more than its share of many; noise may say less than nothing.
        on_top = max((experts * one - many) / (experts - 1), 0.0) if experts > 1 else 0.0
        on_top = min(on_top, many / 2)
        expert.append((many - on_top) / experts)
        call.append(on_top)
    return expert, call


def _usual(time: float, more: float, slowdown: float) -> float:
    """Return what a call would have taken on usual memory: `more` less, within reason.

    A call beside it that others held up shows a slowdown that this one did not have.
    """
    lowest, highest = sorted((time, time / slowdown))
    return min(max(time - more, lowest), highest)
