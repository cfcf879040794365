"""Times products under policies that take turns, on layers that no cache holds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

import ktk
from ktk import _core
from ktk.bench.inputs import random_experts
from ktk.bench.machine import undisturbed
from ktk.bench.records import Subject
from ktk.bench.runner import load_subject, make_layer
from ktk.bench.shapes import find_shape
from ktk.bench.weights import prepare
from ktk.system import available_memory, last_level_cache_bytes
from prefetch.policy import Fetch

SHAPE = find_shape("qwen3-30b-a3b")


@dataclass(frozen=True)
class Effort:
    """How long to measure: of a sample the least seconds, and how often all take their turn."""

    seconds: float
    survey_rounds: int
    duel_rounds: int


FULL = Effort(seconds=0.02, survey_rounds=5, duel_rounds=15)
QUICK = Effort(seconds=0.008, survey_rounds=3, duel_rounds=9)


class Layers:
    """Layers of one variant; each call goes to the experts that were not used for longest."""

    def __init__(self, backend: str, variant: str, pool: ktk.WorkerPool) -> None:
        subject = Subject(backend, variant)
        prepared = prepare(load_subject(subject)[1], random_experts(SHAPE, 2))
        wanted = max(4 * last_level_cache_bytes(), 1 << 30)
        self.layers = [make_layer(subject, SHAPE, prepared, pool)]
        self.expert_bytes = self.layers[0].expert_nbytes
        while sum(layer.nbytes for layer in self.layers) < wanted:
            if self.layers[0].nbytes > 0.6 * available_memory():
                raise MemoryError(
                    f"{wanted / 1e9:.1f} GB of weights are needed so that no cache holds them, "
                    f"and {available_memory() / 1e9:.1f} GB more are free"
                )
            self.layers.append(make_layer(subject, SHAPE, prepared, pool))
        top_k = SHAPE.num_experts_per_tok
        self._experts = [
            torch.arange(first, first + top_k) for first in range(0, SHAPE.num_experts, top_k)
        ]
        self._next = 0

    def caller(self, rows: int) -> Callable[[], None]:
        """Return a call in which `rows` tokens go to the same experts."""
        generator = torch.Generator().manual_seed(rows)
        top_k = SHAPE.num_experts_per_tok
        hidden = torch.randn(rows, SHAPE.hidden_size, generator=generator).bfloat16()
        weights = torch.full((rows, top_k), 1 / top_k)
        ids = [experts.expand(rows, top_k).contiguous() for experts in self._experts]

        def call() -> None:
            turn, which = divmod(self._next, len(self.layers))
            self._next += 1
            self.layers[which](hidden, ids[turn % len(ids)], weights)

        return call


class Clock:
    """Times samples of calls: of at least so many seconds, as many calls in each."""

    def __init__(self, call: Callable[[], None], seconds: float) -> None:
        self._call = call
        self._calls = 1
        for _ in range(3):  # buffers, clock frequency
            call()
        self._calls = max(1, round(seconds / statistics.median(self.sample("") for _ in range(3))))

    def sample(self, setting: str) -> float:
        """Return the seconds of a call under a policy."""
        _core.set_prefetch(setting)
        begin = time.perf_counter()
        for _ in range(self._calls):
            self._call()
        elapsed = time.perf_counter() - begin
        _core.set_prefetch("")
        return elapsed / self._calls


def survey(clock: Clock, settings: Mapping[Fetch, str], rounds: int) -> dict[Fetch, float]:
    """Time all settings in turns; returns the medians of their times over a round's median."""
    relative: dict[Fetch, list[float]] = {fetch: [] for fetch in settings}
    order = list(settings)
    chance = random.Random(0)
    for _ in range(rounds):
        chance.shuffle(order)
        times = undisturbed(lambda: {fetch: clock.sample(settings[fetch]) for fetch in order}).value
        middle = statistics.median(times.values())
        for fetch, seconds in times.items():
            relative[fetch].append(seconds / middle)
    return {fetch: statistics.median(ratios) for fetch, ratios in relative.items()}


@dataclass(frozen=True)
class Duels:
    """Paired ratios, candidate / present policy, and the present policy's seconds."""

    ratios: list[list[float]]
    seconds: list[float]
    others: float


def duel(clock: Clock, settings: Sequence[str], rounds: int) -> Duels:
    """Time each setting beside the present policy, A B and B A in turn."""
    ratios: list[list[float]] = [[] for _ in settings]
    present: list[float] = []
    others = 0.0

    def pair(setting: str, is_first: bool) -> tuple[float, float]:
        if is_first:
            ours = clock.sample(setting)
            return ours, clock.sample("")
        theirs = clock.sample("")
        return clock.sample(setting), theirs

    for number in range(rounds):
        for i, setting in enumerate(settings):
            found = undisturbed(lambda s=setting, n=number: pair(s, n % 2 == 0), tries=3)  # type: ignore[misc]
            ours, theirs = found.value
            ratios[i].append(ours / theirs)
            present.append(theirs)
            others = max(others, found.others)
    return Duels(ratios, present, others)
