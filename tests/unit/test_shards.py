"""Layers are divided into shards of about the same width, whatever the weights are stored as."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import numpy as np
import pytest

import ktk
from ktk import _core
from ktk.errors import BackendUnsupported
from ktk.layer import tell_shards
from ktk.testing import bounds, formats, strategies
from ktk.testing.subject import Subject

INTERMEDIATE = (32, 64, 96, 256, 512, 768, 1408, 1536, 2048)
#: One with a remainder, and one for large blocks.
FEW = (96, 256)
SHARDS = (1, 2, 3, 4, 8)
TOKENS = 2


@functools.cache
def subjects() -> dict[str, Subject]:
    """Return the best variant of each backend that runs here."""
    found = {}
    for name in (
        "AMXINT4",
        "AMXINT8",
        "BF16",
        "BF16Z",
        "BLIS",
        "FP8",
        "KML",
        "LLAMAFILE",
        "MXFP4",
        "RAWINT4",
    ):
        try:
            backend = ktk.load_backend(name)
        except BackendUnsupported:
            continue
        default = backend.core.default_variant()
        found[name] = Subject(backend, next(v for v in backend.variants if v.name == default))
    return found


def conversions() -> list[Any]:
    """All that is stored as it is given, and from floats what each backend chooses."""
    found = []
    for name, subject in subjects().items():
        for pair in strategies.conversions(subject.backend):
            chosen = pair.given.element == "bf16" and pair.stored == subject.backend.formats[0]
            if pair.kept or chosen:
                found.append(pytest.param(subject, pair, id=f"{name}-{pair}".replace(" ", "_")))
    return found


def make_layer(pair: strategies.Conversion, hidden: int, intermediate: int) -> strategies.Layer:
    rng = np.random.default_rng(intermediate)
    shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden)}
    shapes["down"] = (hidden, intermediate)
    arrays: dict[str, Any] = {
        name: [
            formats.make_source(
                pair.given, strategies.fill("normal", shape, rng) / np.float32(8), rng, pair.stored
            )
        ]
        for name, shape in shapes.items()
    }
    config = ktk.MoEConfig(
        num_experts=1, num_experts_per_tok=1, hidden_size=hidden, intermediate_size=intermediate
    )
    return strategies.Layer(config, (pair, pair, pair), **arrays)


def check_widths(widths: tuple[int, ...], extent: int, unit: int) -> None:
    assert sum(widths) == extent
    starts = list(itertools.accumulate(widths, initial=0))[:-1]
    assert all(start % unit == 0 for start in starts)
    # As narrow as whole units allow, and no more than 64 columns apart where they do.
    assert max(widths) <= math.ceil(extent / unit / len(widths)) * unit
    assert max(widths) - min(widths) <= max(unit, 64)


@pytest.mark.parametrize(
    "sizes", [FEW, pytest.param(INTERMEDIATE, marks=pytest.mark.slow)], ids=["few", "all"]
)
@pytest.mark.parametrize(("subject", "pair"), conversions())
def test_any_size_is_cut_into_any_number_of_shards(
    subject: Subject, pair: strategies.Conversion, sizes: tuple[int, ...]
) -> None:
    block = pair.fill_bytes(1)
    unit = math.lcm(32, block)
    hidden = math.lcm(64, block)
    known = formats.has_resolution(subject.act_of(pair.stored))
    for intermediate in sizes:
        if intermediate % block or (block > 64 and intermediate not in (256, 768, 2048)):
            continue  # decoding large blocks takes long
        layer = make_layer(pair, hidden, intermediate)
        rng = np.random.default_rng(7)
        x = rng.standard_normal((TOKENS, hidden)).astype(np.float32)
        batch = strategies.Batch(
            x, np.zeros((TOKENS, 1), np.int64), np.ones((TOKENS, 1), np.float32)
        )
        whole = None
        for shards in SHARDS:
            most = -(-intermediate // unit)
            if shards > most:
                message = f"{intermediate} can be split into at most {most} shards of {unit}, not"
                with pytest.raises(ValueError, match=message):
                    subject.moe(layer, threads=1, shards=shards)
                break
            moe = subject.moe(layer, threads=1, shards=shards)
            assert moe.shards == len(moe.shard_widths) == shards
            check_widths(moe.shard_widths, intermediate, unit)
            stored = moe.unpack_expert(0)
            whole = whole or stored
            if pair.kept:
                for part, cut, uncut in zip(("gate", "up", "down"), stored, whole, strict=True):
                    what = f"{part} of {intermediate} / {shards}"
                    bounds.check_same_bits(np.asarray(cut), np.asarray(uncut), what)
            if known:
                expected = subject.expected(moe, layer, batch)
                got = np.asarray(moe(batch.hidden, batch.ids, batch.weights))
                what = f"{intermediate} / {shards}"
                bounds.check(got, expected.value, expected.error, what)


def test_experts_of_one_layer_may_come_as_floats_and_as_codes() -> None:
    """Cuts of floats are inside groups as well, so that codes of the same groups still fit."""
    subject = subjects()["AMXINT4"]
    stored = ktk.Format("u4", "bf16", "none", 1, 128)
    floats, codes = (
        make_layer(strategies.Conversion(given, stored), 64, 768)
        for given in (ktk.Format("bf16"), stored)
    )
    moes = []
    for shards in (1, 4):
        moe = subject.moe(floats, shards=shards)
        moe.load(**codes.arrays)
        moes.append(moe)
    assert moes[1].shard_widths == (192, 192, 192, 192)
    for cut, uncut in zip(moes[1].unpack_expert(0), moes[0].unpack_expert(0), strict=True):
        bounds.check_same_bits(np.asarray(cut), np.asarray(uncut), "4 shards")


def test_fewer_shards_than_nodes_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "ktk.layer"):
        for shards in (4, 1, 1):
            tell_shards(32, 4, shards)
    (record,) = caplog.records
    assert "size 32 are divided into 1 shards, not one for each of 4 NUMA" in record.getMessage()


def test_scales_that_shards_chose_are_not_written() -> None:
    """A row of the checkpoint's format has one scale, but each shard has chosen one."""
    subject = subjects()["AMXINT8"]
    pair = strategies.Conversion(ktk.Format("bf16"), subject.backend.formats[0])
    moe = subject.moe(make_layer(pair, 64, 64), shards=2)
    with pytest.raises(
        ValueError, match=r"was quantised in 2 shards, .* load the layer with shards=1"
    ):
        _core.submit_write(moe._core, 0, [(1, 1, 1, 1)], False)


def test_shards_are_a_positive_number() -> None:
    sizes: dict[str, Any] = {"num_experts": 1, "num_experts_per_tok": 1, "hidden_size": 64}
    backend = ktk.load_backend("BF16")
    for shards in (0, -1):
        with pytest.raises(ValueError, match=f"shards must be at least 1, got {shards}"):
            backend.moe(**sizes, intermediate_size=64, shards=shards)
    for shards in (1025, 2**31 - 1):
        with pytest.raises(ValueError, match=f"shards must be at most 1024, got {shards}"):
            backend.moe(**sizes, intermediate_size=64, shards=shards)
    moe = backend.moe(**sizes, intermediate_size=64, shards=2)
    assert (moe.shards, moe.shard_widths) == (2, ())
