"""Times layers and the machine's limits in alternation."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ktk
from ktk import _probe
from ktk.bench.inputs import Call, random_experts, routed_calls
from ktk.bench.limits import LimitProbe, Limits, roofline, units_of
from ktk.bench.machine import check_threads, undisturbed
from ktk.bench.records import Result, Settings, Subject
from ktk.bench.shapes import Shape
from ktk.bench.verdict import doubt
from ktk.bench.weights import Recipe, choose_format, prepare, recipe
from ktk.expert import Expert
from ktk.formats import label
from ktk.system import available_memory, last_level_cache_bytes

if TYPE_CHECKING:
    from ktk.bench.model import ModelLayers


@dataclass
class _Turn:
    """One window of a candidate: the median of its calls."""

    seconds: float
    distinct_experts: float
    others: float = 0.0


@dataclass
class _Candidate:
    """A subject with its layers loaded."""

    subject: Subject
    variant: str
    format: str
    layers: list[ktk.MoE]
    units: tuple[str, ...]
    model_layers: int | None = None
    calls: list[Call] = field(default_factory=list)
    next_call: int = 0

    @property
    def bytes_per_expert(self) -> float:
        # Layers of GGUF files differ in their types.
        return statistics.fmean(layer.expert_nbytes for layer in self.layers)

    def call(self) -> tuple[float, int]:
        """Run the next layer on its next input: seconds, and how many experts were hit."""
        layer = self.layers[self.next_call % len(self.layers)]
        inputs = self.calls[self.next_call // len(self.layers) % len(self.calls)]
        self.next_call += 1
        begin = time.perf_counter()
        layer(inputs.hidden, inputs.ids, inputs.weights)
        return time.perf_counter() - begin, inputs.distinct_experts

    def turn(self, seconds: float) -> _Turn:
        times: list[float] = []
        hit: list[int] = []
        end = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            elapsed, experts = self.call()
            times.append(elapsed)
            hit.append(experts)
        return _Turn(statistics.median(times), statistics.fmean(hit))


def run(
    subjects: Sequence[Subject],
    shape: Shape,
    tokens: Sequence[int],
    settings: Settings | None = None,
    progress: Callable[[str], None] = lambda _: None,
    model: ModelLayers | None = None,
) -> list[Result]:
    """Time every subject at every number of tokens, with weights of a model or random ones.

    The subjects take turns within a round, in the other direction every second round, and the
    machine's limits have turns of their own: all see the same machine, and what a neighbour takes
    from one it takes from all.
    """
    settings = settings or Settings()
    check_threads(settings.threads)
    pool = ktk.WorkerPool(settings.threads)
    probe = LimitProbe(pool.size, cpus=[cpu for cpu in pool.cpus if cpu >= 0])
    probe.read(0.01)  # makes its buffer, before the free memory is shared out
    results = []
    if model is None:
        groups = _groups(subjects, shape, _rotated_bytes(settings))
    else:
        groups = iter([[subject] for subject in subjects])
    for group in groups:
        if model is None:
            candidates = _load(group, shape, pool, settings, progress)
        else:
            candidates = [_load_model(one, model, pool, settings, progress) for one in group]
        unit_of = {id(c): _best_unit(probe, c.units) for c in candidates}
        for count in tokens:
            progress(f"{shape.name}, {count} tokens")
            results += _run_tokens(candidates, unit_of, shape, count, probe, settings)
        del candidates
    return results


def _run_tokens(
    candidates: Sequence[_Candidate],
    unit_of: dict[int, str],
    shape: Shape,
    tokens: int,
    probe: LimitProbe,
    settings: Settings,
) -> list[Result]:
    calls = routed_calls(shape, tokens)
    for candidate in candidates:
        candidate.calls, candidate.next_call = calls, 0
        for _ in candidate.layers:  # buffers, pages of the activations, clock frequency
            candidate.call()
    turns: dict[int, list[_Turn]] = {id(candidate): [] for candidate in candidates}
    seen = _Seen(peaks={unit: [] for unit in sorted({*unit_of.values()} - {""})})
    seen.look(probe, settings)
    for number in range(settings.rounds):
        for candidate in candidates if number % 2 == 0 else reversed(candidates):
            turn, others = _quiet(partial(candidate.turn, settings.seconds), settings)
            turn.others = others
            turns[id(candidate)].append(turn)
        seen.look(probe, settings)
    return [
        _result(
            candidate,
            turns[id(candidate)],
            shape,
            tokens,
            seen,
            seen.limits(probe.threads),
            unit_of[id(candidate)],
            settings,
        )
        for candidate in candidates
    ]


@dataclass
class _Seen:
    """The limits as they were measured before, between and after the turns."""

    peaks: dict[str, list[float]]
    reads: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    def look(self, probe: LimitProbe, settings: Settings) -> None:
        read, others = _quiet(partial(probe.read, settings.seconds), settings)
        self.reads.append(read)
        self.others.append(others)
        for unit, found in self.peaks.items():
            found.append(probe.peak(unit, settings.seconds / 4))

    def limits(self, threads: int) -> Limits:
        return Limits(
            threads=threads,
            read_bytes_per_s=statistics.median(self.reads),
            peak_ops_per_s={unit: statistics.median(found) for unit, found in self.peaks.items()},
        )


def _quiet(measure: Callable[[], Any], settings: Settings) -> tuple[Any, float]:
    measured = undisturbed(measure, noise=settings.noise)
    return measured.value, measured.others


def _result(
    candidate: _Candidate,
    turns: Sequence[_Turn],
    shape: Shape,
    tokens: int,
    seen: _Seen,
    limits: Limits,
    unit: str,
    settings: Settings,
) -> Result:
    seconds = statistics.median(turn.seconds for turn in turns)
    hit = statistics.fmean(turn.distinct_experts for turn in turns)
    nbytes, flops = hit * candidate.bytes_per_expert, shape.flops(tokens)
    limit = roofline(limits, nbytes=nbytes, flops=flops, units=[unit])
    extremes = [turn.seconds for turn in turns]
    fraction = limit.fraction(seconds)
    why = doubt(
        fraction,
        limits=seen.reads if limit.bound == "memory" else seen.peaks[unit],
        others=[*(turn.others for turn in turns), *seen.others],
        noise=settings.noise,
    )
    return Result(
        backend=candidate.layers[0].backend.name,
        variant=candidate.variant,
        shape=shape.name,
        tokens=tokens,
        threads=limits.threads,
        seconds=seconds,
        gb_per_s=nbytes / seconds / 1e9,
        gflop_per_s=flops / seconds / 1e9,
        limit_seconds=limit.seconds,
        fraction=None if why else fraction,
        doubt=why or None,
        bound=limit.bound,
        read_gb_per_s=limits.read_bytes_per_s / 1e9,
        peak_gflop_per_s=limits.peak([unit]) / 1e9,
        peak_unit=unit,
        spread=(max(extremes) - min(extremes)) / seconds,
        others=max(turn.others for turn in turns),
        experts_hit=hit,
        layers=len(candidate.layers),
        rotated_gb=sum(layer.nbytes for layer in candidate.layers) / 1e9,
        format=candidate.format,
        model_layers=candidate.model_layers,
        experts_tokens_per_s=(
            tokens / (seconds * candidate.model_layers) if candidate.model_layers else None
        ),
    )


def _best_unit(probe: LimitProbe, units: Sequence[str]) -> str:
    """Return the fastest of a variant's units, "" where none can be measured (AMX emulated)."""
    here = [unit for unit in units if unit in _probe.units()]
    return max(here, key=lambda unit: probe.peak(unit, 0.02), default="")


def _rotated_bytes(settings: Settings) -> int:
    if settings.rotated_bytes is not None:
        return settings.rotated_bytes
    return max(4 * last_level_cache_bytes(), 1 << 30)


def _groups(
    subjects: Sequence[Subject], shape: Shape, rotated_bytes: int
) -> Iterator[Sequence[Subject]]:
    """Split the subjects so that those that alternate fit into 60 % of the free memory together.

    The rest stays free on purpose: it is an estimate, and other processes live here too.
    """
    # No format takes more than bf16, and the last layer of the rotation may be begun in vain.
    layer = 2 * shape.num_experts * shape.weights_per_expert
    each = max(layer, rotated_bytes) + min(layer, rotated_bytes)
    budget = int(0.6 * available_memory())
    if layer > budget:
        fitting = shape.num_experts * budget // layer
        raise MemoryError(
            f"a layer of {shape.name} takes up to {layer / 1e9:.1f} GB, which is more than 60 % "
            f"of the free memory; try --experts {max(fitting, shape.num_experts_per_tok)}"
        )
    size = max(1, budget // each)
    for begin in range(0, len(subjects), size):
        yield subjects[begin : begin + size]


def _load(
    subjects: Sequence[Subject],
    shape: Shape,
    pool: ktk.WorkerPool,
    settings: Settings,
    progress: Callable[[str], None],
) -> list[_Candidate]:
    """Load enough layers of every subject; fewer where memory is short."""
    wanted = _rotated_bytes(settings)
    experts = random_experts(shape, 2)
    candidates = []
    for index, subject in enumerate(subjects):
        progress(f"loading {subject.backend} {subject.variant or ''}")
        share = int(0.6 * available_memory()) // (len(subjects) - index)
        backend, chosen = load_subject(subject)
        prepared = prepare(chosen, experts)
        layers = [make_layer(subject, shape, prepared, pool)]
        nbytes = layers[0].nbytes
        for _ in range(1, max(1, min(-(-wanted // nbytes), share // nbytes))):
            layers.append(make_layer(subject, shape, prepared, pool))  # noqa: PERF401 (slow)
        candidates.append(_candidate(subject, backend, layers))
    return candidates


def _load_model(
    subject: Subject,
    model: ModelLayers,
    pool: ktk.WorkerPool,
    settings: Settings,
    progress: Callable[[str], None],
) -> _Candidate:
    from ktk.bench.model import load_model

    progress(f"loading {model.path} for {subject.backend} {subject.variant or ''}")
    backend = ktk.load_backend(subject.backend)
    wanted = _rotated_bytes(settings)
    layers = load_model(model, backend, wanted, variant=subject.variant, pool=pool)
    return replace(_candidate(subject, backend, layers), model_layers=model.total)


def _candidate(subject: Subject, backend: ktk.Backend, layers: list[ktk.MoE]) -> _Candidate:
    first = layers[0]
    assert first.format is not None, "its experts are loaded"
    sizes = first.config.intermediate_size, first.config.hidden_size
    units = units_of(backend, first.variant, first.format, *sizes)
    stored = (first.format, first.up_format, first.down_format)
    name = "+".join(dict.fromkeys(label(fmt) for fmt in stored if fmt is not None))
    return _Candidate(subject, first.variant, name, layers, units)


def load_subject(subject: Subject) -> tuple[ktk.Backend, Recipe]:
    """Return the backend, and how weights get into the format that is meant."""
    backend = ktk.load_backend(subject.backend)
    return backend, recipe(backend, choose_format(backend, subject.backend, subject.format))


def make_layer(
    subject: Subject, shape: Shape, prepared: Sequence[Expert], pool: ktk.WorkerPool
) -> ktk.MoE:
    """Load a layer whose experts repeat those of `prepare`, each in memory of its own."""
    backend, chosen = load_subject(subject)
    moe = ktk.MoE(backend, shape, variant=subject.variant, pool=pool, weight_format=chosen.stored)
    for expert in range(shape.num_experts):
        moe.load_expert(expert, prepared[expert % len(prepared)])
    return moe
