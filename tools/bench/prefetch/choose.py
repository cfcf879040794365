"""Chooses a policy from paired times, and says how sure the choice is.

A ratio below 1 is a gain. A change is suggested only where the whole interval of the median lies
below 1 by more than the present policy differs from itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from prefetch.policy import ALL_IN_ORDER, Fetch, Policy

LEAST_GAIN = 0.01  # what is not worth a row


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios of times, and where it lies with 95 % confidence or more."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(ratios: Sequence[float]) -> Ratio:
        """Take the interval from the order of the ratios, whatever their distribution."""
        ordered = sorted(ratios)
        n = len(ordered)
        # The median lies outside of the k-th value from either end as often as n tosses of a coin
        # show fewer than k heads, or tails.
        k, outside = 0, 2 * 0.5**n
        while outside <= 0.05:
            k += 1
            outside += 2 * math.comb(n, k) * 0.5**n
        cut = max(k - 1, 0)
        return Ratio(statistics.median(ordered), ordered[cut], ordered[n - 1 - cut])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def over_cases(ratios: Sequence[Sequence[float]]) -> list[float]:
    """Return the geometric mean over cases, round by round."""
    return [statistics.geometric_mean(one) for one in zip(*ratios, strict=True)]


def rank(survey: Sequence[Mapping[Fetch, float]]) -> list[Fetch]:
    """Order candidates by their times, relative ones, over cases; the best first."""
    return sorted(survey[0], key=lambda fetch: _cost(survey, fetch))


def _cost(survey: Sequence[Mapping[Fetch, float]], fetch: Fetch) -> float:
    return sum(math.log(times[fetch]) for times in survey)


def choose_few(survey: Mapping[int, Sequence[Mapping[Fetch, float]]], present: int) -> int:
    """Return the most products of a line that are few: where the best candidate changes.

    Parameters
    ----------
    survey
        For each number of products the relative times of candidates, of all cases that have it.
    present
        What is kept where no other number gains `LEAST_GAIN` on average.
    """
    count = sum(len(cases) for cases in survey.values())

    def cost(few: int) -> float:
        parts = (
            [one for products, cases in survey.items() if (products <= few) == is_few
             for one in cases]
            for is_few in (True, False)
        )  # fmt: skip
        return sum(min(_cost(part, fetch) for fetch in part[0]) for part in parts if part) / count

    best = min(sorted(survey)[:-1], key=cost, default=present)
    return best if cost(best) < cost(present) - LEAST_GAIN else present


def choose_in_order(ratios: Mapping[int, Sequence[tuple[float, float]]], present: int) -> int:
    """Return the most products of a line for which weights are used in the order of memory.

    Parameters
    ----------
    ratios
        For each number of products, of all cases that have it, the times never in order and always
        in order, both relative to the present policy.
    present
        What is kept where no other number gains `LEAST_GAIN` on average.
    """
    count = sum(len(cases) for cases in ratios.values())

    def cost(border: int) -> float:
        times = (
            case[products <= border] for products, cases in ratios.items() for case in cases
        )  # fmt: skip
        return sum(map(math.log, times)) / count

    borders = [0, *sorted(ratios)[:-1], ALL_IN_ORDER]
    best = min(borders, key=cost) if ratios else present
    return best if ratios and cost(best) < cost(present) - LEAST_GAIN else present


def choose_decode(ratios: Mapping[int, Sequence[tuple[float, float]]], present: int) -> int:
    """Return from how many rows on weights are decoded once for all tiles; 0: never.

    Parameters
    ----------
    ratios
        For each number of rows, of all cases that have it, the times never and always decoded once,
        both relative to the present policy.
    present
        What is kept where no other number gains `LEAST_GAIN` on average.
    """
    count = sum(len(cases) for cases in ratios.values())

    def cost(border: int) -> float:
        times = (
            case[0 < border <= rows] for rows, cases in ratios.items() for case in cases
        )  # fmt: skip
        return sum(map(math.log, times)) / count

    best = min([0, *sorted(ratios)], key=cost) if ratios else present
    return best if ratios and cost(best) < cost(present) - LEAST_GAIN else present


def choose_accumulators(ratios: Mapping[int, Sequence[float]], present: int) -> int:
    """Return how many sums keep the multiplier busy.

    Parameters
    ----------
    ratios
        For each number, the times of all cases with it, relative to the present policy.
    present
        What is kept where no other number gains `LEAST_GAIN` on average.
    """
    cost = {
        number: statistics.fmean(map(math.log, times)) for number, times in ratios.items() if times
    }
    best = min(cost, key=cost.__getitem__, default=present)
    return best if best in cost and cost[best] < cost.get(present, 0) - LEAST_GAIN else present


@dataclass(frozen=True)
class Verdict:
    """What a class should have: `best` is its fastest candidate against the present policy."""

    present: Fetch
    best: Fetch
    ratio: Ratio
    noise: Ratio
    by_case: Mapping[str, Ratio]

    @property
    def is_better(self) -> bool:
        """Whether `best` gains more than the noise, and enough to matter."""
        noise = max(1 - self.noise.low, self.noise.high - 1)
        gain = 1 - self.ratio.median
        return self.ratio.high < 1 and gain > noise and gain >= LEAST_GAIN

    @property
    def choice(self) -> Fetch:
        """`best` where it is better, else what there is."""
        return self.best if self.is_better else self.present


def verdict(
    present: Fetch,
    ratios: Mapping[Fetch, Mapping[str, Sequence[float]]],
    itself: Mapping[str, Sequence[float]],
) -> Verdict:
    """Compare candidates with the present policy, and the present policy with itself.

    Parameters
    ----------
    present
        The entry of the class.
    ratios
        For each candidate and case the ratios of times, of as many rounds everywhere.
    itself
        The same for the present policy.
    """
    over = {fetch: over_cases(list(cases.values())) for fetch, cases in ratios.items()}
    best = min(over, key=lambda fetch: statistics.median(over[fetch]))
    return Verdict(
        present=present,
        best=best,
        ratio=Ratio.of(over[best]),
        noise=Ratio.of(over_cases(list(itself.values()))),
        by_case={case: Ratio.of(values) for case, values in ratios[best].items()},
    )


def decide(present: Policy, verdicts: Mapping[str, Verdict], few_products: int) -> Policy:
    """Return the policy to have, with only those entries changed that gain.

    Where `few_products` is another number, verdicts of few and one are of the classes that it
    makes; it counts only if the class that grows gains, since what it takes from the other class
    was not compared otherwise.
    """
    chosen = present
    if few_products != present.few_products:
        grown = "few" if few_products > present.few_products else "one"
        if grown not in verdicts or not verdicts[grown].is_better:
            verdicts = {name: v for name, v in verdicts.items() if name not in ("few", "one")}
        else:
            chosen = replace(chosen, few_products=few_products)
    for name, found in verdicts.items():
        chosen = chosen.with_entry(name, found.choice)
    return chosen
