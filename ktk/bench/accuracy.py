"""How far a layer's output is from float64 arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

import ktk
from ktk.bench.inputs import (
    DISTRIBUTIONS,
    Call,
    ExpertWeights,
    random_experts,
    routed_calls,
)
from ktk.bench.records import Subject
from ktk.bench.runner import load_subject, make_layer
from ktk.bench.shapes import Shape
from ktk.bench.weights import prepare
from ktk.formats import label
from ktk.testing import reference
from ktk.testing.bounds import Array, relative_error
from ktk.testing.formats import as_float64


@dataclass(frozen=True)
class Accuracy:
    """Relative L2 errors of a layer's output.

    `kernel` is against float64 arithmetic on the weights as stored, `quantization` what storing
    them costs by itself, `total` against float64 arithmetic on the original bf16 weights. Rounding
    the output to bf16 alone makes 0.0017. `weights` names the distribution of the weights, see
    `ktk.bench.inputs`, and `format` what they are stored as. Random blocks have no original, and so
    no error of quantization.
    """

    backend: str
    variant: str
    shape: str
    tokens: int
    kernel: float
    quantization: float
    total: float
    weights: str
    format: str

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


def measure_accuracy(
    subjects: Sequence[Subject], shape: Shape, *, tokens: int = 32, threads: int = 0
) -> list[Accuracy]:
    """Compare one call of every subject with float64, for each distribution of weights.

    Every expert is different here. Of large layers only 16 experts are made: the error of an
    output depends on the extents and on the number of experts summed, not on how many there are.
    """
    small = replace(shape, num_experts=min(shape.num_experts, max(16, shape.num_experts_per_tok)))
    call = routed_calls(small, tokens, seed=1)[0]
    pool = ktk.WorkerPool(threads)
    results = []
    for distribution in DISTRIBUTIONS:
        experts = random_experts(small, small.num_experts, seed=1, distribution=distribution)
        exact = expected_output(small, call, experts.__getitem__)
        for subject in subjects:
            _, chosen = load_subject(subject)
            moe = make_layer(subject, small, prepare(chosen, experts), pool)
            got = as_float64(moe(call.hidden, call.ids, call.weights))
            stored = expected_output(small, call, partial(_stored, moe, experts))
            original = stored if chosen.is_random else exact
            results.append(
                Accuracy(
                    backend=moe.backend.name,
                    variant=moe.variant,
                    shape=shape.name,
                    tokens=tokens,
                    kernel=relative_error(got, stored),
                    quantization=relative_error(stored, original),
                    total=relative_error(got, original),
                    weights=distribution,
                    format=label(chosen.stored),
                )
            )
    return results


def expected_output(shape: Shape, call: Call, weights_of: Callable[[int], ExpertWeights]) -> Array:
    """Compute a call in float64 with the weights that are returned for each expert."""
    return reference.layer(
        call.hidden,
        call.ids,
        call.weights,
        lambda expert: reference.Expert.of(vars(weights_of(expert))),
        shape,
    )


def _stored(moe: ktk.MoE, given: Sequence[ExpertWeights], expert: int) -> ExpertWeights:
    gate, up, down = (torch.from_numpy(matrix) for matrix in moe.unpack_expert(expert))
    return replace(given[expert], gate=gate, up=up, down=down)
