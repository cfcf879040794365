"""Says from paired ratios of times whether a change lost speed, and how sure that is.

A ratio is new / old of two samples that follow each other, in turns old first and new first. What
noise there is (others' work, modes of memory, drift) comes to both sides alike, so that without a
change a ratio is as likely above 1 as below, however large outliers are. The median of ratios has
an interval from their order alone, whatever their distribution; a cell is measured until that
interval lies on one side of the limit.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LOSS = 0.05  # what a change may lose
# Chance of a wrong verdict in a cell, however often it is looked at while it is measured.
ERROR = 0.01
#: After so many pairs a cell is looked at; the chance of an error is divided among these looks.
LOOKS = (12, 16, 24, 32, 48, 64, 96, 128)


@dataclass(frozen=True)
class Verdict:
    """`state` is "passes", "fails" or "undecided"; the interval is that of the median ratio."""

    state: str
    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.state}: {self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def bounds(ratios: Sequence[float], error: float) -> tuple[float, float]:
    """Return limits that the true median passes with at most a chance of `error`, each.

    The k-th smallest ratio lies above the median as often as fewer than k of n tosses of a coin
    show heads (the sign test). Without such a k there is no limit.
    """
    ordered = sorted(ratios)
    n = len(ordered)
    k, chance = 0, 0.5**n
    while chance <= error and k < n:
        k += 1
        chance += math.comb(n, k) * 0.5**n
    if k == 0:
        return 0.0, math.inf
    return ordered[k - 1], ordered[n - k]


def decide(ratios: Sequence[float], *, loss: float = LOSS, looks: int = len(LOOKS)) -> Verdict:
    """Judge a cell.

    It fails if even the lower limit of the median is a loss of more than `loss`, and passes if the
    upper one is no more than that. Both at once is impossible, since both limits are those of one
    median.
    """
    low, high = bounds(ratios, ERROR / looks)
    state = "fails" if low > 1 + loss else "passes" if high <= 1 + loss else "undecided"
    return Verdict(state, statistics.median(ratios), low, high)
