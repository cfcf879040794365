"""One line of the demo: a variant loads the layer, is checked against float64, and is timed."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.bench.limits import Limits, roofline, units_of
from ktk.checkpoint.open import open_checkpoint
from ktk.demo.routing import Batch
from ktk.loading.load import load_layers
from ktk.loading.plan import plan_layer
from ktk.testing.bounds import Array, relative_error
from ktk.testing.formats import as_float64

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.demo.machine import Machine
    from ktk.moe import MoE

# Long enough for a stable median, short enough that a dozen variants take a few seconds.
_SECONDS = 0.25
_CALLS = 5


@dataclass(frozen=True)
class Task:
    """What every variant has to do."""

    path: Path
    reading: dict[str, Any]  # options of open_checkpoint
    layer: int
    check: Batch
    expected: Array
    decode: list[Batch]
    prefill: list[Batch]


@dataclass(frozen=True)
class Timing:
    """The median time of a call, and what has to be read and computed in it at least."""

    tokens: int
    seconds: float
    nbytes: float
    flops: float
    units: tuple[str, ...]

    def fraction(self, limits: Limits) -> float:
        """Return the share of the machine's limit that was reached."""
        bound = roofline(limits, nbytes=self.nbytes, flops=self.flops, units=self.units)
        return bound.fraction(self.seconds)


@dataclass(frozen=True)
class Measured:
    """What came out. `error` is relative to the norm of the result in float64.

    `decoded` says what became of weights that the backend does not take as the checkpoint has them.
    """

    backend: str
    variant: str
    nbytes: int
    load_seconds: float
    error: float
    decode: Timing
    prefill: Timing
    decoded: str = ""


def measure(task: Task, backend: Backend, variant: str, pool: Any, machine: Machine) -> Measured:
    """Run the task with one variant of a backend, and look at the units that its weights take."""
    began = time.perf_counter()
    moe, decoded = _load(task, backend, variant=variant, pool=pool)
    load_seconds = time.perf_counter() - began
    got = as_float64(moe(task.check.hidden, task.check.ids, task.check.weights))
    assert moe.format is not None, "its experts are loaded"
    sizes = moe.config.intermediate_size, moe.config.hidden_size
    units = units_of(backend, variant, moe.format, *sizes)
    machine.look(units)
    return Measured(
        backend=backend.name,
        variant=variant,
        nbytes=moe.nbytes,
        load_seconds=load_seconds,
        error=relative_error(got, task.expected),
        decode=_time(moe, task.decode, units),
        prefill=_time(moe, task.prefill, units),
        decoded=decoded,
    )


def _load(task: Task, backend: Backend, **options: Any) -> tuple[MoE, str]:
    """Load the layer; returns it, and what became of the weights before the backend got them."""
    with open_checkpoint(task.path, **task.reading) as checkpoint:
        plan = plan_layer(checkpoint, task.layer, backend, None, None, options)
        how = plan.route.how
        return load_layers(checkpoint, [plan])[task.layer], how if "decoded" in how else ""


def _time(moe: MoE, calls: list[Batch], units: tuple[str, ...]) -> Timing:
    for batch in calls[:2]:
        moe(batch.hidden, batch.ids, batch.weights)
    seconds: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(seconds) < _CALLS or time.perf_counter() < end:
        batch = calls[len(seconds) % len(calls)]
        began = time.perf_counter()
        moe(batch.hidden, batch.ids, batch.weights)
        seconds.append(time.perf_counter() - began)
    config = moe.config
    weights = len(config.parts) * config.hidden_size * config.intermediate_size
    hits = statistics.mean(batch.hits for batch in calls)
    return Timing(
        tokens=len(calls[0].ids),
        seconds=statistics.median(seconds),
        nbytes=moe.expert_nbytes * hits,
        flops=2.0 * weights * calls[0].ids.numel(),
        units=units,
    )
