"""The limits of this machine, looked at again before every variant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ktk import _probe
from ktk.bench.limits import LimitProbe, Limits

# One look at one limit.
_SECONDS = 0.05


class Machine:
    """Keeps the best that was seen: other programs can only make a measurement worse."""

    def __init__(self, pool: Any) -> None:
        self._probe = LimitProbe(pool.size, cpus=pool.cpus)
        self._read = 0.0
        self._peaks: dict[str, float] = {}

    def look(self, units: Iterable[str]) -> None:
        """Measure reading and these arithmetic units."""
        self._read = max(self._read, self._probe.read(_SECONDS))
        for unit in set(units) & set(_probe.units()):
            seen = self._probe.peak(unit, _SECONDS)
            self._peaks[unit] = max(seen, self._peaks.get(unit, 0.0))

    def limits(self) -> Limits:
        """Return the limits seen so far."""
        return Limits(self._probe.threads, self._read, dict(self._peaks))
