"""Dense layers for the kit: what to load, what to multiply, and what should come out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from hypothesis import strategies as st

import ktk
from ktk.testing import formats, reference, strategies
from ktk.testing.strategies import F32
from ktk.testing.subject import Subject, pool

#: Values of weights and inputs. Sums of products of the huge ones would leave the range of f16.
KINDS = strategies.LAYER_KINDS


@dataclasses.dataclass(frozen=True, repr=False)
class Dense(formats.Summary):
    """The parts of a weight, and a bias that may be None."""

    parts: list[formats.Source]
    bias: F32 | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the weight."""
        return sum(len(part.values) for part in self.parts), self.parts[0].values.shape[1]

    @property
    def kept(self) -> bool:
        """Whether all parts are stored as they are given."""
        return all(part.format == part.stored for part in self.parts)

    def __repr__(self) -> str:
        return f"Dense(parts={self.parts}, bias={self.bias is not None})"

    def make(
        self, subject: Subject, *, threads: int = 2, shards: int | None = None, only: Any = None
    ) -> ktk.Linear:
        """Make a layer and load all parts, or the one with the number `only`."""
        parts = self.parts if only is None else [self.parts[only]]
        linear = ktk.Linear(
            subject.backend,
            self.shape[1],
            sum(len(part.values) for part in parts),
            self.bias is not None,
            variant=subject.variant.name,
            pool=pool(threads),
            shards=shards,
            weight_format=[part.stored for part in parts],
        )
        ends = np.cumsum([len(part.values) for part in self.parts])[:-1]
        biases = [None] * len(self.parts) if self.bias is None else np.split(self.bias, ends)
        return linear.load(
            [part.data for part in parts],
            [part.scale for part in parts],
            [part.zero for part in parts],
            list(biases if only is None else [biases[only]]),
            [part.format for part in parts],
        )

    def expected(
        self, subject: Subject, linear: ktk.Linear, x: F32, out: str = "f32"
    ) -> reference.Uncertain:
        """Compute the layer in float64 from the weight that is stored, with the bound of it."""
        if len(x) == 0:  # groups of nothing have no largest value
            nothing = np.zeros((0, linear.out_features))
            return reference.Uncertain(nothing, nothing)
        exact = x.astype(np.float64)
        weight = linear.unpack().astype(np.float64)
        values, errors, row = [], [], 0
        with np.errstate(all="ignore"):
            for part in self.parts:
                rows = slice(row, row + len(part.values))
                row = rows.stop
                act = subject.act_of(part.stored)
                stored = reference.encode(reference.Uncertain(exact, np.zeros_like(exact)), act)
                bias = None if self.bias is None else self.bias[rows].astype(np.float64)
                y = reference.matmul(stored, weight[rows], reach=part.reach)
                y = reference.biased(y, bias)
                values.append(y.value)
                errors.append(y.error)
            total = reference.Uncertain(np.concatenate(values, 1), np.concatenate(errors, 1))
            element = formats.ELEMENTS[out]
            assert isinstance(element, formats.Float)
            return total.widened(element.rounding(total.size, up_to=True))


#: Depths of models: more elements of a matrix than two bytes count, many blocks of k, and one depth
#: that 15 bits do not count. Widths, and tokens of a prompt. The largest ones stand first, where
#: Hypothesis begins, so that a few examples have them.
DEPTHS = (33056, 12320, 8200, 4128)
WIDTHS = (4100, 2056, 1000)
TOKENS = (1100, 520, 300)
#: What of a layer is as large as in models.
EXTENTS = ("deep", "wide", "tall")


@st.composite
def layers(draw: st.DrawFn, backend: Any, variant: Any, extent: str = "") -> Dense:
    """Dense layers of one to three parts, half the time of one format.

    With an extent of EXTENTS a layer has one part: a "deep" or "wide" one is as deep or as wide as
    those of models, and for a "tall" one inputs() has as many rows.
    """
    pairs = strategies.conversions(backend)
    first = draw(st.sampled_from(pairs), label="conversion")
    count = 1 if extent else draw(st.integers(1, 3), label="parts")
    mixed = draw(st.booleans(), label="mixed")
    chosen = [first] + [
        draw(st.sampled_from(pairs), label="conversion of a part") if mixed else first
        for _ in range(count - 1)
    ]
    steps = {step for pair in chosen for step in pair.k_steps}
    block = math.lcm(*(pair.fill_bytes(1) for pair in chosen))
    depths = strategies.sizes(variant.k_step, *steps)
    k = draw(st.sampled_from(DEPTHS) if extent == "deep" else depths, label="k")
    k = -(-k // block) * block
    if block > strategies.LARGE_BLOCK and extent != "deep":
        k = min(k, 2 * block)
    kind = draw(st.sampled_from(KINDS), label="kind of weights")
    rng = np.random.default_rng(draw(strategies.seeds(), label="seed of weights"))
    parts = []
    for pair in chosen:
        widths = strategies.sizes(variant.n_step, *pair.n_steps)
        n = draw(st.sampled_from(WIDTHS) if extent == "wide" else widths, label="n")
        values = strategies.fill(kind, (n, k), rng) * np.float32(k**-0.5)
        parts.append(formats.make_source(pair.given, values, rng, pair.stored, at_edges=True))
    rows = sum(len(part.values) for part in parts)
    bias = strategies.fill("normal", (rows,), rng) if draw(st.booleans(), label="bias") else None
    return Dense(parts, bias)


def inputs(layer: Dense, least: int = 0, extent: str = "") -> st.SearchStrategy[F32]:
    """Rows to multiply: few, which each worker encodes for itself, and more."""
    counts = st.integers(least, 9) | st.sampled_from([17, 33, 70])
    if extent == "tall":
        counts = st.sampled_from(TOKENS)
    return counts.flatmap(
        lambda count: strategies.matrices((count, layer.shape[1]), KINDS, "inputs")
    )
