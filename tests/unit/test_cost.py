"""MoE.cost: what is predicted from tables, and what is measured by a clock that is not real."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ktk
from ktk.cost import CostTable
from ktk.cost.measure import Clock, _Samples, evaluate, measure
from ktk.errors import CheckpointError

LAYER = {"backend": "BF16", "num_experts_per_tok": 8}
# Two points on either side of the border between reading (100) and arithmetic (10 a row).
TABLE = CostTable(LAYER, (1, 4, 20, 40), (100.0, 100.0, 200.0, 400.0), (5.0, 8.0, 8.0, 16.0), 0.5)


def _slow(*parameters: float) -> list[Any]:
    return [pytest.param(one, marks=pytest.mark.slow) for one in parameters]


def test_tables_are_interpolated_and_summed() -> None:
    # One token of 8 experts: the call that is measured has one, so nothing is added for tokens.
    assert TABLE.seconds([1] * 8) == 8 * 100 + 5
    assert TABLE.seconds([1] * 8 + [0] * 100) == 8 * 100 + 5
    # 12 rows lie half way; the measured call has 24 tokens, this one 12.
    assert TABLE.seconds([12]) == pytest.approx(150 + 8 - 12 * 0.5)
    assert TABLE.seconds([12], tokens=24) == pytest.approx(150 + 8)
    assert TABLE.seconds([12, 0, 4], tokens=124) == pytest.approx(150 + 100 + 8 + 100 * 0.5)
    # Beyond the table by the share of rows; what a call takes on top likewise.
    assert TABLE.seconds([80], tokens=160) == pytest.approx(800 + 32)
    assert TABLE.seconds([], tokens=10) == TABLE.seconds([0, 0], tokens=10) == 5
    assert TABLE.seconds(np.array([1, 0], np.uint16)) == 105


def test_tokens_are_at_least_what_rows_need() -> None:
    assert TABLE.seconds([1] * 17) == TABLE.seconds([1] * 17, tokens=3)  # 17 rows of 8 each
    assert TABLE.seconds([9, 1]) == TABLE.seconds([9, 1], tokens=9)


def test_slower_memory_slows_what_waits_for_it() -> None:
    assert TABLE.seconds([1], memory_slowdown=2) == pytest.approx(200 + 5)
    assert TABLE.seconds([1], memory_slowdown=0.5) == pytest.approx(50 + 5)
    # 20 rows take 200 of arithmetic, so that reading may take as long; 40 rows never notice.
    assert TABLE.seconds([20], 40, 2) == pytest.approx(200 + 8)
    assert TABLE.seconds([20], 40, 3) == pytest.approx(300 + 8)
    assert TABLE.seconds([40], 80, 3) == pytest.approx(400 + 16)


@pytest.mark.parametrize("slowdown", [0.3, *_slow(1.0, 1.7, 4.0)])
def test_more_rows_and_slower_memory_never_take_less(slowdown: float) -> None:
    chance = random.Random(1)
    for _ in range(50):
        points = sorted({1, *(chance.randrange(2, 600) for _ in range(6))})
        times = [chance.uniform(1, 2) * max(50, point) for point in points]
        table = CostTable(LAYER, tuple(points), tuple(times), (1.0,) * len(points), 0.0)
        costs = [table.seconds([rows], 10_000, slowdown) for rows in range(1, 700)]
        assert all(np.diff(costs) >= -1e-9)
        rows = [chance.randrange(9) for _ in range(30)]
        slower = table.seconds(rows, None, slowdown * 1.1)
        assert slower >= table.seconds(rows, None, slowdown) - 1e-9


@pytest.mark.parametrize("slowdown", [0.6, 1.0, 1.7])
def test_a_call_tells_how_slow_memory_is(slowdown: float) -> None:
    rows = [1] * 8
    took = TABLE.seconds(rows, None, slowdown)
    assert TABLE.memory_slowdown(rows, took) == pytest.approx(slowdown, rel=1e-3)
    assert TABLE.memory_slowdown([40] * 8, 5000) is None
    # A call that was held up for a second says no more than the most that makes sense.
    assert TABLE.memory_slowdown(rows, 1e9) == pytest.approx(5, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([1.5], {}, "rows_per_expert must be a list of integers, got float64 of shape"),
        ([[1]], {}, r"got int64 of shape \(1, 1\)"),
        ([3, -1], {}, "rows_per_expert has -1 rows for expert 1"),
        ([3], {"tokens": 2}, "an expert has 3 rows of 2 tokens"),
        ([3], {"memory_slowdown": 0}, "memory_slowdown must be above 0"),
        ([3], {"memory_slowdown": float("nan")}, "memory_slowdown must be above 0"),
    ],
)
def test_what_makes_no_sense(rows: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TABLE.seconds(rows, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": (1,), "expert_seconds": (1.0,), "call_seconds": (1.0,)}, "two or more points"),
        ({"rows": (1, 2, 3)}, "two times for each"),
        ({"rows": (2, 4, 20, 40)}, "ascending from 1"),
        ({"rows": (1, 4, 4, 40)}, "ascending from 1"),
        ({"call_seconds": (1.0, 1.0, 1.0, -1.0)}, "numbers from 0 on"),
        ({"expert_seconds": (1.0, 0.0, 1.0, 1.0)}, "those of experts above 0"),
        ({"token_seconds": float("nan")}, "numbers from 0 on"),
    ],
)
def test_tables_that_are_none(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostTable(**(vars(TABLE) | changes))


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "cost.json"
    TABLE.save(path)
    assert CostTable.load(path) == TABLE
    whole = json.loads(path.read_text())
    for change, message in [
        ({"format": "ktk.expert_counts"}, "is no file of ktk.cost: its format is"),
        ({"version": 2}, "has version 2 of ktk.cost, this ktk reads 1"),
        ({"layer": 7}, "layer"),
        ({"layer": {}}, "num_experts_per_tok"),
        ({"rows": None}, "rows must be a list, got None"),
        ({"rows": [1, 4, 20, 40.5]}, "rows"),
        ({"expert_seconds": ["1", 1, 1, 1]}, "expert_seconds"),
        ({"call_seconds": [1]}, "two times for each of them"),
        ({"token_seconds": -1}, "from 0 on"),
    ]:
        path.write_text(json.dumps(whole | change))
        with pytest.raises(CheckpointError, match=message) as found:
            CostTable.load(path)
        assert str(path) in str(found.value)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        CostTable.load(path)
    with pytest.raises(CheckpointError, match="is missing"):
        CostTable.load(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="cannot be written: No such file"):
        TABLE.save(tmp_path / "none" / "cost.json")


class Machine:
    """A layer and its clock: calls take what a formula says, on memory whose speed changes."""

    def __init__(self, experts: int, noise: float, modes: Sequence[float]) -> None:
        self.config = SimpleNamespace(hidden_size=4)
        self.loaded = tuple(range(3, 3 + experts))  # the first ones live elsewhere
        self.nbytes = 1 << 62  # more than a cache holds
        self.pool = None
        self.used: list[int] = []
        self._chance = random.Random(0)
        self._noise, self._modes = noise, modes
        self._now, self._mode = 0.0, modes[0]

    def time(self) -> float:
        return self._now

    @staticmethod
    def takes(rows: Sequence[int], tokens: int, mode: float) -> float:
        reads = sum(max(mode * 200e-6, 20e-6 * one) + 2e-6 * one for one in rows)
        return reads + 15e-6 + 1e-6 * tokens

    def __call__(self, hidden: Any, topk_ids: Any, topk_weights: Any, *, out: Any) -> None:
        ids, weights = topk_ids, topk_weights
        assert hidden.shape == out.shape == (len(ids), 4)
        assert ids.shape == weights.shape
        experts, rows = np.unique(ids[ids >= 0], return_counts=True)
        assert set(experts.tolist()) <= set(self.loaded)
        self.used += experts.tolist()
        if self._chance.random() < 0.1:
            self._mode = self._chance.choice(self._modes)
        took = self.takes(rows.tolist(), len(ids), self._mode)
        # Others take time from a call now and then, and never give any.
        held_up = 3 if self._chance.random() < 0.03 else 1
        self._now += took * held_up * (1 + self._noise * self._chance.random())


@pytest.mark.parametrize("modes", [(1.0,), (1.0, 1.75)], ids=["steady", "modes"])
@pytest.mark.parametrize("experts", [1, 5, 8, 21])
def test_measured_tables_predict_the_machine(experts: int, modes: Sequence[float]) -> None:
    machine = Machine(experts, 0.02, modes)
    table = measure(machine, LAYER, time=machine.time)
    assert set(machine.used) == set(machine.loaded)
    chance = random.Random(1)
    for _ in range(200):
        most = chance.choice([1, 3, 9])  # mostly memory, some of both, mostly arithmetic
        rows = [int(2 ** chance.uniform(0, most)) for _ in range(chance.randrange(1, 60))]
        tokens = chance.randrange(max(rows), 1025)
        mode = chance.uniform(0.8, 2)
        few = [1] * 8
        slowdown = table.memory_slowdown(few, machine.takes(few, 1, mode), 1)
        assert slowdown is not None
        predicted = table.seconds(rows, tokens, slowdown)
        assert predicted == pytest.approx(machine.takes(rows, tokens, mode), rel=0.15)


class Sleeper(Machine):
    """A layer that fits the cache, and whose workers sleep while something else takes its place."""

    def __init__(self) -> None:
        super().__init__(21, 0.02, (1.0,))
        self.nbytes = 100
        self.asleep = False

    def max(self) -> None:
        self.asleep = True

    def wake(self) -> None:
        self.asleep = False

    def __call__(self, hidden: Any, topk_ids: Any, topk_weights: Any, *, out: Any) -> None:
        super().__call__(hidden, topk_ids, topk_weights, out=out)
        self._now += self.asleep * 500e-6
        self.wake()


def test_layers_that_fit_the_cache_are_measured_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Sleeper()
    monkeypatch.setattr("ktk.cost.measure.last_level_cache_bytes", lambda: 100)
    monkeypatch.setattr("ktk.cost.measure.Clock", partial(_clock_of, monkeypatch, machine))
    table = measure(machine, LAYER, time=machine.time)
    took = machine.takes([1] * 8, 1, 1.0)
    assert table.seconds([1] * 8, 1) == pytest.approx(took, rel=0.05)


def test_waking_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktk.cost.measure.last_level_cache_bytes", lambda: 1 << 20)
    clock = Clock(loaded(pool=ktk.WorkerPool(2)), time.perf_counter)
    clock.call(1, 1)
    time.sleep(0.1)  # workers look for work for less than that, and then sleep
    before = switches_of_workers()
    clock._wake()
    time.sleep(0.1)
    assert switches_of_workers() > before


def switches_of_workers() -> int:
    """Return how often threads of all pools have gone to sleep."""
    tasks = [task.read_text() for task in Path("/proc/self/task").glob("*/status")]
    texts = (text for text in tasks if text.startswith("Name:\tktk-"))
    return sum(int(re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", one, re.M)[0]) for one in texts)


def _clock_of(monkeypatch: pytest.MonkeyPatch, machine: Sleeper, *arguments: Any) -> Clock:
    clock = Clock(*arguments)
    assert clock._other is not None
    clock._other = machine  # type: ignore[assignment]
    monkeypatch.setattr(clock, "_wake", machine.wake)
    return clock


def test_calls_that_are_held_up_make_no_impossible_table() -> None:
    chance = random.Random(0)
    for _ in range(100):
        samples = {
            rows: _Samples(*([10 ** chance.uniform(-5, 0) for _ in range(3)] for _ in range(3)))
            for rows in (1, 8, 64)
        }
        expert, call = evaluate(samples, chance.choice([1, 8]))
        assert CostTable(LAYER, tuple(samples), tuple(expert), tuple(call), 0.0)


def layer(**others: Any) -> ktk.MoE:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "hidden_size": 64}
    options: dict[str, Any] = {"intermediate_size": 64, "pool": ktk.WorkerPool(1)} | sizes | others
    return ktk.load_backend("BF16").moe(**options)


def loaded(**others: Any) -> ktk.MoE:
    moe = layer(**others)
    rng = np.random.default_rng(0)
    inner, width = moe.config.intermediate_size, moe.config.hidden_size
    for expert in (0, 2, 3):
        shapes = ((inner, width), (inner, width), (width, inner))
        moe.load_expert(expert, *(rng.standard_normal(shape, np.float32) for shape in shapes))
    return moe


def test_layers_predict_when_they_have_been_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    moe = layer()
    with pytest.raises(RuntimeError, match="no expert is loaded"):
        moe.measure_cost()
    with pytest.raises(RuntimeError, match=r"call measure_cost\(\) once"):
        moe.cost([1, 0, 0, 0])
    # A gigabyte of memory read ahead of each call would take as long as all other tests here.
    monkeypatch.setattr("ktk.cost.measure.last_level_cache_bytes", lambda: 1 << 20)
    moe = loaded()
    table = moe.measure_cost()
    assert moe.cost_table is table
    assert table.layer["backend"] == "BF16"
    assert table.layer["threads"] == 1
    assert moe.cost([1, 0, 5, 0]) == table.seconds([1, 0, 5, 0]) > 0
    assert moe.cost([1, 0, 5, 0], tokens=99, memory_slowdown=2) == table.seconds([1, 5], 99, 2)
    with pytest.raises(ValueError, match="has 3 entries, and the layer 4 experts"):
        moe.cost([1, 2, 3])

    other = loaded()
    table.save(tmp_path / "cost.json")
    other.cost_table = CostTable.load(tmp_path / "cost.json")
    assert other.cost([7, 0, 0, 1]) == moe.cost([7, 0, 0, 1])
    with pytest.raises(ValueError, match="of another layer: intermediate_size 64, not 128"):
        loaded(intermediate_size=128).cost_table = table
    with pytest.raises(ValueError, match="threads 1, not 2"):
        loaded(pool=ktk.WorkerPool(2)).cost_table = table
    with pytest.raises(TypeError, match=r"must be a ktk\.cost\.CostTable or None"):
        other.cost_table = {}  # type: ignore[assignment]
    other.cost_table = None
    assert other.cost_table is None
