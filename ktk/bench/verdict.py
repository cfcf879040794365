"""Whether a fraction of a limit means anything: time and limit must be of one machine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

# Above this a layer was not streamed from memory, or the limit is not that of the time it is held
# against. Up to it, a limit that is itself measured may be off.
HIGHEST_FRACTION = 1.1
# Largest over smallest of the measurements of one limit, all in the same alternation. Undisturbed
# they differ by a few per cent; a machine whose memory or clock changed its mode by tens.
STEADY = 1.25


def doubt(
    fraction: float,
    *,
    limits: Sequence[float],
    others: Sequence[float],
    noise: float,
) -> str:
    """Return why a fraction is worth nothing; empty where it can be printed.

    Parameters
    ----------
    fraction : float
        The limit's time over the time measured.
    limits : sequence of float
        The measurements of the limit: one before, between and after the turns.
    others : sequence of float
        The share of the CPUs that other processes took, of each turn and of each limit.
    noise : float
        What they may take.
    """
    taken = statistics.median(others)
    if taken > noise:
        return f"other processes took {taken:.0%} of the CPUs"
    if max(limits) > STEADY * min(limits):
        times = max(limits) / min(limits)
        return f"the machine's limit changed by a factor of {times:.1f} while it was measured"
    if fraction > HIGHEST_FRACTION:
        return "faster than the limit: weights came from a cache, or others disturbed the limit"
    return ""
