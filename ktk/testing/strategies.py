"""Hypothesis strategies for the inputs of a backend.

Hypothesis draws the structure (sizes, kind of values, seed) and NumPy fills in the numbers:
examples stay quick to make, and shrink to a small shape of a simple kind.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from ktk.testing import formats

F32 = npt.NDArray[np.float32]

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
    values = rng.standard_normal(shape)
    if kind == "zero":
        values = np.zeros(shape)
    elif kind == "uniform":
        values = rng.uniform(-1, 1, shape)
    elif kind == "sparse":
        values = values * (rng.random(shape) < 0.1)
    elif kind == "outlier":
        values = np.where(rng.random(shape) < 0.02, values * 1e4, values)
    elif kind == "powers":
        values = np.sign(values) * 2.0 ** rng.integers(-12, 12, shape)
    elif kind == "ties":
        # Nine significant bits: bf16 rounds each of them to even.
        values = np.sign(values) * (rng.integers(128, 256, shape) + 0.5)
    elif kind == "tiny":
        values = values * 1e-36
    elif kind == "subnormal":
        values = values * 1e-40
    elif kind == "huge":
        values = values * 2.0**45
    elif kind == "extreme":
        values = np.clip(values * 2.0**127, -(2.0**127) * 1.99, 2.0**127 * 1.99)
    elif kind == "mixed":
        values = values * 2.0 ** rng.integers(-140, 100, shape)
    return values.astype(np.float32)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for NumPy."""
    return st.integers(0, 2**16)


def sizes(step: int, limit: int) -> st.SearchStrategy[int]:
    """Extents from 1 to ``limit``, with a liking for the neighbours of multiples of ``step``."""
    edges = {
        edge + d
        for edge in (1, *range(step, limit + 1, step))
        for d in (-1, 0, 1)
        if 1 <= edge + d <= limit
    }
    return st.sampled_from(sorted(edges)) | st.integers(1, limit)


def _limit(step: int, least: int) -> int:
    return max(least, 2 * step + 3)


def rows(variant: Any) -> st.SearchStrategy[int]:
    """Numbers of rows around the row step and the reach of each micro-kernel."""
    limit = 37
    reach = {m for _, m_max in variant.ukernels for m in (m_max, m_max + 1) if m <= limit}
    return st.sampled_from(sorted({1, 2, 3, *reach})) | sizes(variant.m_step, limit)


@dataclasses.dataclass(frozen=True)
class Problem(formats.Summary):
    """Activations (m, k) and a weight matrix (n, k)."""

    act: F32 = dataclasses.field(repr=False)
    source: formats.Source


@st.composite
def matrices(
    draw: st.DrawFn, shape: tuple[int, ...], kinds: tuple[str, ...] = KINDS, label: str = "values"
) -> F32:
    """Arrays of a given shape."""
    kind = draw(st.sampled_from(kinds), label=f"kind of {label}")
    return fill(kind, shape, np.random.default_rng(draw(seeds(), label=f"seed of {label}")))


@st.composite
def sources(
    draw: st.DrawFn,
    backend: Any,
    shape: tuple[int, int],
    kinds: tuple[str, ...] = KINDS,
    given: Any = None,
) -> formats.Source:
    """Matrices in one of the formats that the backend accepts."""
    known = [fmt for fmt in backend.accepts if formats.is_known(fmt)]
    fmt = given or draw(st.sampled_from(known), label="given format")
    values = draw(matrices(shape, kinds, "weight"))
    rng = np.random.default_rng(draw(seeds(), label="seed of codes"))
    return formats.make_source(fmt, values, rng)


@st.composite
def problems(
    draw: st.DrawFn, backend: Any, variant: Any, kinds: tuple[str, ...] = KINDS
) -> Problem:
    """Problems with sizes next to the tile edges of the variant."""
    m = draw(rows(variant), label="m")
    n = draw(sizes(variant.n_step, _limit(variant.n_step, 70)), label="n")
    k = draw(sizes(variant.k_step, _limit(variant.k_step, 70)), label="k")
    act = draw(matrices((m, k), kinds, "act"))
    return Problem(act, draw(sources(backend, (n, k), kinds)))


def cuts(extent: int, step: int) -> st.SearchStrategy[list[int]]:
    """Ways to cut an extent at multiples of a step: [0, ..., extent]."""
    inner = list(range(step, extent, step))
    if not inner:
        return st.just([0, extent])
    chosen = st.lists(st.sampled_from(inner), unique=True, max_size=3)
    return chosen.map(lambda at: [0, *sorted(at), extent])


# --- whole layers -------------------------------------------------------------------------------

ACTIVATIONS: tuple[dict[str, Any], ...] = (
    {"activation": "silu"},
    {"activation": "silu", "activation_limit": 2.0},
    {"activation": "swigluoai", "activation_limit": 7.0, "activation_alpha": 1.702},
    {
        "activation": "swigluoai",
        "activation_limit": 1.5,
        "activation_alpha": 1.0,
        "clamp_gate_below": True,
    },
    {"activation": "gelu_tanh"},
    {"activation": "gelu_tanh", "activation_limit": 2.0},
)


@dataclasses.dataclass(frozen=True)
class Layer(formats.Summary):
    """The configuration and the weights of a layer. Biases are None or arrays."""

    config: dict[str, Any]
    gate: F32 = dataclasses.field(repr=False)
    up: F32 = dataclasses.field(repr=False)
    down: F32 = dataclasses.field(repr=False)
    gate_bias: F32 | None = dataclasses.field(default=None, repr=False)
    up_bias: F32 | None = dataclasses.field(default=None, repr=False)
    down_bias: F32 | None = dataclasses.field(default=None, repr=False)

    @property
    def biases(self) -> dict[str, Any]:
        """As keywords of ``MoE.load``."""
        names = ("gate_bias", "up_bias", "down_bias")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Batch(formats.Summary):
    """Tokens and their routing."""

    hidden: F32 = dataclasses.field(repr=False)
    ids: npt.NDArray[np.int64]
    weights: F32 = dataclasses.field(repr=False)


@st.composite
def layers(draw: st.DrawFn, variant: Any, activation: dict[str, Any] | None = None) -> Layer:
    """Layers of a few small experts; the intermediate size has a chance to be cut into shards."""
    experts = draw(st.integers(1, 5), label="experts")
    top_k = draw(st.integers(1, min(experts, 4)), label="top_k")
    step = max(variant.k_step, variant.n_step)
    hidden = draw(sizes(step, _limit(step, 70)), label="hidden_size")
    intermediate = draw(sizes(step, _limit(step, 70)), label="intermediate_size")
    kind = draw(st.sampled_from(LAYER_KINDS), label="kind of weights")
    rng = np.random.default_rng(draw(seeds(), label="seed of weights"))
    scale = np.float32(hidden**-0.5)
    config = {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        **(activation or draw(st.sampled_from(ACTIVATIONS), label="activation")),
    }
    shapes = {"gate": (experts, intermediate, hidden), "up": (experts, intermediate, hidden)}
    shapes["down"] = (experts, hidden, intermediate)
    arrays = {name: fill(kind, shape, rng) * scale for name, shape in shapes.items()}
    if draw(st.booleans(), label="biases"):
        arrays |= {f"{name}_bias": fill("normal", shapes[name][:2], rng) for name in shapes}
    return Layer(config, **arrays)


@st.composite
def batches(
    draw: st.DrawFn, config: dict[str, Any], min_tokens: int = 0, outside: bool = True
) -> Batch:
    """Tokens with any routing: repeated experts and, with ``outside``, ids that mean nothing."""
    tokens = draw(
        st.integers(min_tokens, 9) | st.sampled_from([max(17, min_tokens), 33]), label="tokens"
    )
    experts, top_k = config["num_experts"], config["num_experts_per_tok"]
    hidden = draw(matrices((tokens, config["hidden_size"]), LAYER_KINDS, "hidden"))
    rng = np.random.default_rng(draw(seeds(), label="seed of routing"))
    low, high = (-2, experts + 2) if outside else (0, experts)
    routing = draw(st.sampled_from(["random", "one expert", "nothing"][: 2 + outside]))
    ids = rng.integers(low, high, (tokens, top_k))
    if routing == "one expert":
        ids = np.full((tokens, top_k), rng.integers(0, experts))
    elif routing == "nothing":
        ids = np.full((tokens, top_k), -1)
    weights = rng.standard_normal((tokens, top_k)).astype(np.float32)
    return Batch(hidden, ids.astype(np.int64), weights)
