"""tools/bench/gate: what it decides from times with every kind of noise."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

from gate import __main__ as gate
from gate.__main__ import Build, compare, executed, main, status
from gate.counter import TASK_CLOCK, Counter
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


def test_a_counter_counts_threads_that_start_later() -> None:
    try:
        clock = Counter(TASK_CLOCK)  # which every machine has, as it may not have instructions
    except OSError as error:
        pytest.skip(f"perf_event_open: {error}")

    of_threads: list[int] = []

    def work() -> None:
        own = Counter(TASK_CLOCK)
        end = time.thread_time() + 0.05
        while time.thread_time() < end:
            pass
        of_threads.append(own.read())
        own.close()

    start, before = time.perf_counter(), clock.read()
    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    starting, rest = time.perf_counter() - start, Counter(TASK_CLOCK)
    for thread in threads:
        thread.join()
    counted = (clock.read() - before) / 1e9
    others = (sum(of_threads) + rest.read()) / 1e9
    for counter in (clock, rest):
        counter.close()
    # By the same clock: it goes on while the hypervisor has the CPU, as times of threads do not.
    assert 0.15 <= counted <= others + starting + 0.02


def test_what_is_not_counted_is_an_error_with_a_reason() -> None:
    # There is no event of this type; a sandbox allows none at all, or has no such call.
    codes = (errno.ENOENT, errno.EINVAL, errno.EACCES, errno.EPERM, errno.ENOSYS)
    reasons = "|".join(os.strerror(code) for code in codes)
    with pytest.raises(OSError, match=reasons):
        Counter((99, 0))


def test_instructions_are_said_where_both_builds_count_them() -> None:
    assert executed([100.0, 104.0, 102.0], [51.0, 51.0]) == "; instructions 0.500"
    assert executed([], [51.0]) == executed([51.0], []) == ""


def test_a_status_has_one_meaning() -> None:
    assert status({"passes", "undecided", "fails"}) == 1
    assert status({"passes", "undecided"}) == 3
    assert status({"passes"}) == 0
    assert status(set()) == 2


def test_cells_that_cannot_run_compare_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Nothing:
        def __init__(self, *_: object) -> None:
            self.instructions: list[float] = []

        def sample(self, *_: object) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(gate, "Build", Nothing)
    assert main(["old", "new", "-b", "BF16", "--tokens", "1,8"]) == 2
    assert capsys.readouterr().out.count("cannot run here") == 2


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["/nowhere/python", "/nowhere/python"], "/nowhere/python cannot be started"),
        (["old", "new", "--tokens", "x"], "--tokens"),
        (["old", "new", "--tokens", "0"], "at least one token"),
    ],
)
def test_what_compares_nothing_has_a_status_of_its_own(arguments: list[str], what: str) -> None:
    folder = Path(gate.__file__).parent
    done = subprocess.run([sys.executable, folder, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert what in done.stderr
    assert "Traceback" not in done.stderr


def test_a_build_that_has_ended_can_be_closed() -> None:
    build = Build("true", [])
    build._process.wait()
    with pytest.raises(RuntimeError, match="true ended with status 0"):
        build.sample("BF16", 1, 0.01)
    build.close()


def test_an_answer_that_is_none_is_named() -> None:
    build = Build("cat", ["-"])  # the text of the worker, and then what it is asked
    with pytest.raises(RuntimeError, match="cat answers"):
        build.sample("BF16", 1, 0.01)
    build.close()
