"""tools/bench/gate: what it decides from times with every kind of noise."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

from gate.__main__ import compare
from gate.decide import bounds, decide


class Noisy:
    """A machine on which two builds take turns."""

    def __init__(self, seed: int, *, modes: bool, outliers: bool, drift: bool) -> None:
        self._chance = random.Random(seed)
        self._modes, self._outliers, self._drift = modes, outliers, drift
        self._mode, self._samples = 1.0, 0

    def sample(self, slower: float) -> float:
        chance = self._chance
        self._samples += 1
        if self._modes and chance.random() < 0.1:
            self._mode = chance.choice([1.0, 1.8])
        took = slower * self._mode * (1 + 0.02 * chance.random())
        if self._drift:
            took *= 1 + self._samples * 0.005
        if self._outliers and chance.random() < 0.15:
            took *= chance.uniform(1, 20)
        return took


KINDS = [(False, False, False), (True, False, False), (False, True, False), (False, False, True)]
KINDS += [(True, True, True)]


@pytest.mark.parametrize(("modes", "outliers", "drift"), KINDS)
@pytest.mark.parametrize(
    ("slower", "wrong", "right"), [(1.0, "fails", "passes"), (1.08, "passes", "fails")]
)
def test_noise_breaks_no_verdict(
    slower: float, wrong: str, right: str, modes: bool, outliers: bool, drift: bool
) -> None:
    found = []
    for seed in range(200):
        machine = Noisy(seed, modes=modes, outliers=outliers, drift=drift)
        base, changed = partial(machine.sample, 1.0), partial(machine.sample, slower)
        verdict = compare(base, changed, 0.05)
        assert verdict is not None
        found.append(verdict.state)
    # Of 200 no more than four times the chance of an error, which is 1 % at most.
    assert found.count(wrong) <= 8
    assert found.count(right) >= 180


def test_limits_of_the_median_come_from_the_order() -> None:
    ratios = [1.0 + i / 100 for i in range(12)]
    # One of 12 tosses: 1 / 4096; two or fewer: (1 + 12 + 66) / 4096.
    assert bounds(ratios, 1 / 4096) == (1.0, 1.11)
    assert bounds(ratios, 79 / 4096) == pytest.approx((1.02, 1.09))
    assert bounds(ratios, 1 / 5000) == (0.0, float("inf"))


def test_too_few_samples_decide_nothing() -> None:
    assert decide([2.0] * 5).state == "undecided"
    assert decide([2.0] * 12).state == "fails"
    assert decide([1.0] * 12).state == "passes"


def test_a_cell_between_stays_undecided() -> None:
    chance = random.Random(0)
    assert decide([1.05 + chance.uniform(-0.1, 0.1) for _ in range(128)]).state == "undecided"


def test_what_could_not_run_is_left_out_and_what_can_no_longer_fails() -> None:
    nothing: Callable[[], float | None] = lambda: None  # noqa: E731
    assert compare(nothing, lambda: 1.0, 0.05) is None
    lost = compare(lambda: 1.0, nothing, 0.05)
    assert lost is not None
    assert lost.state == "fails"
