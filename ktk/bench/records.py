"""What is asked of the runner, and what comes out of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Subject:
    """What to time: a backend, which of its variants and which of its formats.

    None: the variant that it would choose, the format that its name means. `format` is written as
    `ktk.bench.weights.choose_format` takes it.
    """

    backend: str
    variant: str | None = None
    format: str | None = None


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes
    ----------
    threads : int
        Workers; 0 for all physical cores.
    rounds : int
        How often everything takes its turn. The median over the rounds counts.
    seconds : float
        Length of one turn.
    rotated_bytes : int or None
        Weights to rotate through, so that small batches stream them from memory; default: four
        times the last-level cache, at least 1 GiB.
    noise : float
        Share of the CPUs that others may use before a turn is repeated.
    """

    threads: int = 0
    rounds: int = 3
    seconds: float = 0.5
    rotated_bytes: int | None = None
    noise: float = 0.05


@dataclass(frozen=True)
class Result:
    """One line of the output; rates in 1e9 per second.

    `seconds` is the median time of a call, `limit_seconds` what the machine needs at least (see
    `ktk.bench.limits`), measured in the same alternation, and ``fraction = limit_seconds /
    seconds``, or None where that means nothing, and then `doubt` says why (`ktk.bench.verdict`).
    `spread` is (slowest - fastest turn) / `seconds`; `others` the largest share of the CPUs that
    other processes took from a turn. Of a checkpoint, `model_layers` is how many layers have
    experts, and `experts_tokens_per_s` the tokens that pass the experts of all of them in a
    second: experts only, no attention, norms or routing.
    """

    backend: str
    variant: str
    shape: str
    tokens: int
    threads: int
    seconds: float
    gb_per_s: float
    gflop_per_s: float
    limit_seconds: float
    fraction: float | None
    doubt: str | None
    bound: str
    read_gb_per_s: float
    peak_gflop_per_s: float
    peak_unit: str
    spread: float
    others: float
    experts_hit: float
    layers: int
    rotated_gb: float
    format: str
    model_layers: int | None = None
    experts_tokens_per_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)
