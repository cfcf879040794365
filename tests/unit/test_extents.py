"""Every backend takes layers of many experts, of many for each token, and of odd sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import ktk
from ktk.config import MoEConfig
from ktk.errors import BackendUnsupported
from ktk.testing import bounds, formats, plugin
from ktk.testing.strategies import Batch, Conversion, Layer, conversions
from ktk.testing.subject import Subject

NAMES = [info.name for info in ktk.backends().values() if info.distribution == "ktk" and info.built]
# How many experts differ: a prime, so that no power of two leads from one to another like it.
DISTINCT = 17


@functools.cache
def subjects(name: str) -> list[Subject]:
    backend = plugin.load(name)
    return [Subject(backend, variant) for variant in backend.variants if variant.runnable]


def cases(*, all_conversions: bool) -> Iterator[Any]:
    for name in NAMES:
        try:
            found = subjects(name)
        except BackendUnsupported as error:  # a library is missing
            yield pytest.param(None, None, id=name, marks=pytest.mark.skip(reason=str(error)))
            continue
        for subject in found:
            pairs = conversions(subject.backend)
            small = next(pair for pair in pairs if pair.fill_bytes(8) <= 32)
            for pair in pairs if all_conversions else [small]:
                where = f"{name}-{subject.variant.name}"
                label = f"-{pair.given}-{pair.stored}" if all_conversions else ""
                yield pytest.param(subject, pair, id=(where + label).replace(" ", "_"))


def check(
    subject: Subject, pair: Conversion, hidden: int, inner: int, experts: int, k: int
) -> None:
    """Compare a layer of random weights with what it is in float64."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    some = min(experts, DISTINCT)
    sources = {
        part: [
            formats.make_source(
                pair.given,
                (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32),
                rng,
                pair.stored,
            )
            for _ in range(some)
        ]
        for part, shape in shapes.items()
    }
    gate, up, down = ([each[e % some] for e in range(experts)] for each in sources.values())
    config = MoEConfig(
        num_experts=experts, num_experts_per_tok=k, hidden_size=hidden, intermediate_size=inner
    )
    layer = Layer(config, (pair, pair, pair), gate=gate, up=up, down=down)
    # Each expert has a token at most, in an order of its own, but for the first and the last.
    order = rng.permutation(experts)[: 3 * k].reshape(-1, k)
    order[0, 0], order[-1, -1] = 0, experts - 1
    batch = Batch(
        rng.standard_normal((len(order), hidden)).astype(np.float32),
        order.astype(np.int64),
        rng.random(order.shape).astype(np.float32),
    )
    moe = subject.moe(layer)
    want = subject.expected(moe, layer, batch)
    got = np.asarray(moe(batch.hidden, batch.ids, batch.weights))
    bounds.check(got, want.value, want.error, f"{experts} experts, {k} each, {hidden} x {inner}")


@pytest.mark.parametrize(("subject", "pair"), [*cases(all_conversions=False)])
def test_a_thousand_experts_of_which_each_token_has_sixty_four(
    subject: Subject, pair: Conversion
) -> None:
    least = pair.fill_bytes(8)
    check(subject, pair, least, least, 1024, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("hidden", "inner"), [(8, 8), (40, 24), (24, 200)])
@pytest.mark.parametrize(("subject", "pair"), [*cases(all_conversions=True)])
def test_sizes_are_multiples_of_eight_or_blocks_of_a_file(
    subject: Subject, pair: Conversion, hidden: int, inner: int
) -> None:
    """Groups and blocks of scales may end early. Rows of ggml's types are whole blocks in files."""
    assert pair.fill_bytes(1) <= 8 or subject.backend.name == "LLAMAFILE"
    check(subject, pair, pair.fill_bytes(hidden), pair.fill_bytes(inner), 6, 2)
