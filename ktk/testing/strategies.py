"""Hypothesis strategies for the inputs of a backend.

Hypothesis draws the structure (sizes, kind of values, seed) and NumPy fills in the numbers:
examples stay quick to make, and shrink to a small shape of a simple kind.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from ktk.config import ACTIVATIONS as NAMES
from ktk.config import MoEConfig
from ktk.testing import formats
from ktk.testing.activations import ACTIVATIONS as KNOWN
from ktk.testing.activations import OPTIONS

F32 = npt.NDArray[np.float32]

#: Elements of a block above which a layer has no more than two of them in a row.
LARGE_BLOCK = 64

#: Examples of one part of a property (a pair of formats, say), however many parts there are.
FEWEST = 4

#: Columns that cuts of the intermediate size are multiples of.
LEAST_COLUMNS = 32

#: Values that any product of two matrices can take: sums of products stay inside float32.
KINDS = (
    *("normal", "zero", "uniform", "sparse", "outlier", "powers", "ties"),
    *("tiny", "subnormal", "huge"),
)
#: Values that show how they were rounded.
ROUNDED_KINDS = ("normal", "ties", "outlier", "powers")
#: Values for a codec alone.
CODEC_KINDS = (*KINDS, "extreme", "mixed")
#: Values for a whole layer, where gate and up are multiplied with each other.
LAYER_KINDS = ("normal", "zero", "uniform", "sparse", "outlier", "powers", "tiny")


def fill(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> F32:
    """Return an array of the kind."""
    if kind == "zero":
        return np.zeros(shape, np.float32)
    if kind == "uniform":
        return rng.random(shape, np.float32) * 2 - 1
    values: F32 = rng.standard_normal(shape, np.float32)
    if kind == "sparse":
        values = values * (rng.random(shape, np.float32) < 0.1)
    elif kind == "outlier":
        values = np.where(rng.random(shape, np.float32) < 0.02, values * np.float32(1e4), values)
    elif kind == "powers":
        values = np.ldexp(np.sign(values), rng.integers(-12, 12, shape, np.int32))
    elif kind == "ties":
        # Nine significant bits: bf16 rounds each of them to even.
        halves = rng.integers(128, 256, shape, np.int32).astype(np.float32) + np.float32(0.5)
        values = np.sign(values) * halves
    elif kind == "tiny":
        values = values * np.float32(1e-36)
    elif kind == "subnormal":
        values = values * np.float32(1e-40)
    elif kind == "huge":
        values = values * np.float32(2.0**45)
    elif kind == "extreme":
        most = np.float32(1.99)
        values = np.clip(values, -most, most) * np.float32(2.0**127)
    elif kind == "mixed":
        values = np.ldexp(values, rng.integers(-140, 100, shape, np.int32))
    return values


def share_examples(parts: Collection[Any]) -> settings:
    """Set the examples of one part, so that all together get what a property gets."""
    return settings(max_examples=max(settings().max_examples // len(parts), FEWEST))


def seeds() -> st.SearchStrategy[int]:
    """Seeds for NumPy."""
    return st.integers(0, 2**16)


def sizes(*steps: int, least: int = 70, most: int | None = None) -> st.SearchStrategy[int]:
    """Extents from 1 to twice the largest step, with a liking for the neighbours of multiples.

    Or to ``most``, if that is given and more than ``least``.
    """
    limit = max(least, most or 2 * max(steps) + 3)
    edges = {
        edge + d
        for step in steps
        for edge in (1, *range(step, limit + 1, step))
        for d in (-1, 0, 1)
        if 1 <= edge + d <= limit
    }
    return st.sampled_from(sorted(edges)) | st.integers(1, limit)


def rows(variant: Any) -> st.SearchStrategy[int]:
    """Numbers of rows around the row step and the reach of each micro-kernel."""
    # The last one, which reaches everything, has no limit of its own.
    limit = max([37, *(m_max + 1 for _, m_max in variant.ukernels[:-1])])
    reach = {m for _, m_max in variant.ukernels for m in (m_max, m_max + 1) if m <= limit}
    near = range(variant.m_step, limit + 1, variant.m_step)
    return st.sampled_from(sorted({1, 2, 3, *reach, *near})) | st.integers(1, limit)


@dataclasses.dataclass(frozen=True)
class Conversion(formats.Summary):
    """A format that a backend accepts, and one that it then stores."""

    given: Any
    stored: Any

    def __str__(self) -> str:
        """Say both, or the one that is kept."""
        return str(self.given) if self.kept else f"{self.given} as {self.stored}"

    @property
    def kept(self) -> bool:
        """Whether weights are stored as they are given."""
        return bool(self.given == self.stored)

    @property
    def n_steps(self) -> tuple[int, ...]:
        """Rows that groups span."""
        return tuple({fmt.group_n for fmt in (self.given, self.stored)} - {0})

    @property
    def k_steps(self) -> tuple[int, ...]:
        """Columns that groups span."""
        return tuple({fmt.group_k for fmt in (self.given, self.stored)} - {0})

    def fill_bytes(self, extent: int) -> int:
        """Round an extent up to whole bytes or blocks of what is given."""
        return formats.fill_bytes(self.given, extent)


def conversions(
    backend: Any, wanted: Callable[[Conversion], bool] = lambda _: True
) -> list[Conversion]:
    """All pairs of a format that the backend accepts and one that it stores it as."""
    pairs = [Conversion(given, backend.formats[at]) for given, at in backend.core.accepts]
    return [pair for pair in pairs if formats.is_known(pair.given) and wanted(pair)]


@dataclasses.dataclass(frozen=True, repr=False)
class Problem(formats.Summary):
    """Activations (m, k) and a weight matrix (n, k)."""

    act: F32
    source: formats.Source

    def __repr__(self) -> str:
        return f"Problem(m={len(self.act)}, weight={self.source})"


@st.composite
def matrices(
    draw: st.DrawFn, shape: tuple[int, ...], kinds: tuple[str, ...] = KINDS, label: str = "values"
) -> F32:
    """Arrays of a given shape."""
    kind = draw(st.sampled_from(kinds), label=f"kind of {label}")
    return fill(kind, shape, np.random.default_rng(draw(seeds(), label=f"seed of {label}")))


@st.composite
def sources(
    draw: st.DrawFn, backend: Any, variant: Any, pairs: Any = None, kinds: tuple[str, ...] = KINDS
) -> formats.Source:
    """Matrices in one of the formats that the backend accepts, for any that it stores it as.

    Their sizes are next to the tile edges of the variant and the edges of groups. ``pairs`` are the
    conversions to choose from, by default all of them.
    """
    pair = draw(st.sampled_from(pairs or conversions(backend)), label="conversion")
    n = draw(sizes(variant.n_step, *pair.n_steps), label="n")
    k = pair.fill_bytes(draw(sizes(variant.k_step, *pair.k_steps), label="k"))
    values = draw(matrices((n, k), kinds, "weight"))
    rng = np.random.default_rng(draw(seeds(), label="seed of codes"))
    return formats.make_source(pair.given, values, rng, pair.stored, at_edges=True)


@st.composite
def problems(
    draw: st.DrawFn, backend: Any, variant: Any, kinds: tuple[str, ...] = KINDS, pairs: Any = None
) -> Problem:
    """Weights, and activations with numbers of rows around the reach of each micro-kernel."""
    source = draw(sources(backend, variant, pairs, kinds))
    m = draw(rows(variant), label="m")
    return Problem(draw(matrices((m, source.values.shape[1]), kinds, "act")), source)


def cuts(extent: int, step: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut an extent at multiples of a step: [0, ..., extent]."""
    inner = list(range(step, extent, step))
    if not inner:
        return st.just([0, extent])
    chosen = st.lists(st.sampled_from(inner), unique=True, max_size=3)
    return chosen.map(lambda at: [0, *sorted(at), extent])


# --- whole layers -------------------------------------------------------------------------------

# The core computes activation functions, the same for every backend: here each has one of the
# options in turn, and where a clamp has another place all. tests/native/test_ops.cc has the rest.
_WITH_ALL = ("silu", "swiglustep")
#: All activation functions of layers, also those that the reference will call unknown, with the
#: options that they are tested with.
ACTIVATIONS: tuple[dict[str, Any], ...] = tuple(
    {"activation": name, **options, **case}
    for number, name in enumerate(NAMES)
    for case in (KNOWN[name].cases if name in KNOWN else ({},))
    for options in (OPTIONS if name in _WITH_ALL else OPTIONS[number % len(OPTIONS) :][:1])
)


@dataclasses.dataclass(frozen=True)
class Layer(formats.Summary):
    """The configuration and the weights of a layer: one source per expert. Biases may be None."""

    config: MoEConfig
    conversions: tuple[Conversion, Conversion, Conversion]  # of gate, up and down
    # Of gate, nothing where experts have none.
    gate: list[formats.Source] = dataclasses.field(repr=False)
    up: list[formats.Source] = dataclasses.field(repr=False)
    down: list[formats.Source] = dataclasses.field(repr=False)
    gate_bias: F32 | None = dataclasses.field(default=None, repr=False)
    up_bias: F32 | None = dataclasses.field(default=None, repr=False)
    down_bias: F32 | None = dataclasses.field(default=None, repr=False)

    @property
    def biases(self) -> dict[str, Any]:
        """As keywords of ``MoE.load``."""
        names = ("gate_bias", "up_bias", "down_bias")
        return {name: getattr(self, name) for name in names}

    @property
    def arrays(self) -> dict[str, Any]:
        """All of it, as keywords of ``MoE.load``."""
        given = tuple(pair.given for pair in self.conversions)
        same = given[0] == given[1] == given[2]
        found: dict[str, Any] = {"given": given[0] if same else given, **self.biases}
        found["gate"] = None
        for name in self.config.parts:
            sources = getattr(self, name)
            found[name] = [source.data for source in sources]
            for suffix in ("scale", "zero"):
                arrays = [getattr(source, suffix) for source in sources]
                found[f"{name}_{suffix}"] = arrays if arrays[0] is not None else None
        return found

    @property
    def stored(self) -> Any:
        """What gate, up and down shall be stored as."""
        return tuple(pair.stored for pair in self.conversions)

    @property
    def most_shards(self) -> int:
        """Parts that the intermediate size can be cut into: whole blocks of down, 32 columns."""
        step = math.lcm(LEAST_COLUMNS, self.conversions[2].fill_bytes(1))
        return int(-(-self.config.intermediate_size // step))


@dataclasses.dataclass(frozen=True)
class Batch(formats.Summary):
    """Tokens and their routing."""

    hidden: F32 = dataclasses.field(repr=False)
    ids: npt.NDArray[np.int64]
    weights: F32 = dataclasses.field(repr=False)


@st.composite
def _mixed(draw: st.DrawFn, backend: Any) -> tuple[Conversion, Conversion, Conversion]:
    """Draw conversions of gate, up and down, half the time the same one."""
    pairs = conversions(backend)
    gate = draw(st.sampled_from(pairs), label="conversion")
    if not draw(st.booleans(), label="mixed"):
        return gate, gate, gate

    up = draw(st.sampled_from(pairs), label="conversion of up")
    return gate, up, draw(st.sampled_from(pairs), label="conversion of down")


def _depth(extent: int, *pairs: Conversion) -> int:
    """Round an extent up to whole bytes or blocks of all that have it as depth.

    Of large blocks no more than two, so that a layer stays small.
    """
    block = math.lcm(*(pair.fill_bytes(1) for pair in pairs))
    rounded = -(-extent // block) * block
    return min(rounded, 2 * block) if block > LARGE_BLOCK else rounded


@st.composite
def layers(
    draw: st.DrawFn, backend: Any, variant: Any, activation: dict[str, Any] | None = None
) -> Layer:
    """Layers of a few small experts; the intermediate size has a chance to be cut into shards."""
    experts = draw(st.integers(1, 5), label="experts")
    zero = draw(st.sampled_from([0, 0, 1, 3]), label="zero_expert_num")
    top_k = draw(st.integers(1, min(experts + zero, 4)), label="top_k")
    gate, up, down = draw(_mixed(backend))
    gated = draw(st.sampled_from([True, True, False]), label="gated")
    if not gated:
        gate = up
    # Either size is the rows of one matrix and the depth of another.
    groups = {step for pair in (gate, up, down) for step in (*pair.n_steps, *pair.k_steps)}
    steps = (max(variant.k_step, variant.n_step), *groups)
    hidden = _depth(draw(sizes(*steps), label="hidden_size"), gate, up)
    # One of both reaches into a second one of the largest step, which shows as much in less time.
    most = max(steps) if hidden > max(steps) else None
    intermediate = _depth(draw(sizes(*steps, most=most), label="intermediate_size"), down)
    kind = draw(st.sampled_from(LAYER_KINDS), label="kind of weights")
    rng = np.random.default_rng(draw(seeds(), label="seed of weights"))
    scale = np.float32(hidden**-0.5)
    config = MoEConfig(
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        gated=gated,
        apply_router_weight_on_input=draw(
            st.sampled_from([False, False, True]), label="apply_router_weight_on_input"
        ),
        zero_expert_num=zero,
        **(activation or draw(st.sampled_from(ACTIVATIONS), label="activation")),
    )
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden)}
    shapes["down"] = (hidden, intermediate)
    arrays: dict[str, Any] = {
        name: [
            formats.make_source(
                pair.given, fill(kind, shape, rng) * scale, rng, pair.stored, at_edges=True
            )
            for _ in range(experts if name in config.parts else 0)
        ]
        for (name, shape), pair in zip(shapes.items(), (gate, up, down), strict=True)
    }
    if draw(st.booleans(), label="biases"):
        for name in config.parts:
            arrays[f"{name}_bias"] = fill("normal", (experts, shapes[name][0]), rng)
    return Layer(config, (gate, up, down), **arrays)


@st.composite
def batches(draw: st.DrawFn, config: MoEConfig, min_tokens: int = 0, outside: bool = True) -> Batch:
    """Tokens with any routing: repeated experts, zero experts, and ids that mean nothing.

    Without ``outside``, ids are of experts only.
    """
    tokens = draw(
        st.integers(min_tokens, 9) | st.sampled_from([max(17, min_tokens), 33, 70]), label="tokens"
    )
    experts, top_k = config.num_experts, config.num_experts_per_tok
    hidden = draw(matrices((tokens, config.hidden_size), LAYER_KINDS, "hidden"))
    rng = np.random.default_rng(draw(seeds(), label="seed of routing"))
    low, high = (-2, config.num_ids + 2) if outside else (0, experts)
    kinds = ["random", "one expert", *(["nothing", "zero experts"] if outside else [])]
    routing = draw(st.sampled_from(kinds))
    ids = rng.integers(low, high, (tokens, top_k))
    if routing == "one expert":
        ids = np.full((tokens, top_k), rng.integers(0, experts))
    elif routing == "nothing":
        ids = np.full((tokens, top_k), -1)
    elif routing == "zero experts":  # or nothing, where there are none
        ids = rng.integers(experts, config.num_ids + 1, (tokens, top_k))
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    return Batch(hidden, ids.astype(np.int64), weights)
