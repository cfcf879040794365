"""Properties of every backend, whoever wrote it: what its codecs keep of weights and activations.

The plugin supplies `subject`, a backend and a variant; `pair`, each format that the backend accepts
with one that it stores it as; or `kept`, those that are stored as they are given. Without these,
examples draw their formats. These are plain functions on purpose: Hypothesis refuses a `@given`
method that several classes inherit.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ktk.quantize import from_bytes
from ktk.testing import bounds, formats, strategies
from ktk.testing.subject import Subject

# --- weight codec -------------------------------------------------------------------------------


@given(data=st.data())
def test_weights_keep_the_precision_of_their_format(subject: Subject, data: st.DataObject) -> None:
    """Packing loses no more than half a step of what is stored."""
    pairs = strategies.conversions(
        subject.backend, lambda pair: formats.has_resolution(pair.stored)
    )
    if not pairs:
        pytest.skip("the kit does not know what is stored")
    kinds = strategies.CODEC_KINDS
    source = data.draw(strategies.sources(subject.backend, subject.variant, pairs, kinds))
    unpacked = subject.pack(source).unpack()
    formats.check_codec(source.stored, source.format, unpacked, source.values)


def test_weights_that_are_stored_as_given_keep_their_bits(
    subject: Subject, kept: strategies.Conversion
) -> None:
    """Where a format is accepted and stored, packing is a bit-exact round trip."""

    @strategies.share_examples(strategies.conversions(subject.backend))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        kinds = strategies.CODEC_KINDS
        source = data.draw(strategies.sources(subject.backend, subject.variant, [kept], kinds))
        unpacked = subject.pack(source).unpack()
        assert unpacked.dtype == np.float32
        bounds.check(unpacked, source.values.astype(np.float32), 0.0, "unpacked weight")

    holds()


def test_rows_of_a_source_may_lie_apart(subject: Subject, pair: strategies.Conversion) -> None:
    """Columns of a wider matrix, as shards cut them, are packed to the bits of a matrix alone."""

    @strategies.share_examples(strategies.conversions(subject.backend))
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        source = data.draw(strategies.sources(subject.backend, subject.variant, [pair]))
        before, behind = (data.draw(st.integers(0, 2), label=at) for at in ("before", "behind"))
        rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of other columns"))
        apart = subject.pack(formats.with_rows_apart(source, before, behind, rng))
        bounds.check_same_bits(apart.buffer, subject.pack(source).buffer, "packed weight")

    holds()


@given(data=st.data())
def test_packing_a_range_writes_only_its_rows(subject: Subject, data: st.DataObject) -> None:
    """Row ranges are packed by different workers at the same time."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, subject.variant.n_step), label="cuts")
    whole = matrix.buffer.copy()
    owner = np.full(whole.shape, -1)
    for number, (begin, end) in enumerate(pairwise(at)):
        written = np.zeros(whole.shape, bool)
        for poison in (0x5A, 0xA5):
            matrix.buffer[:] = poison
            subject.repack(matrix, problem.source, begin, end)
            written |= matrix.buffer != poison
        twice = np.flatnonzero(written & (owner >= 0))
        assert len(twice) == 0, (
            f"packing rows [{begin}, {end}) wrote byte {twice[0]}, which belongs to rows"
            f" [{at[owner[twice[0]]]}, {at[owner[twice[0]] + 1]})"
        )
        wrong = np.flatnonzero(written & (matrix.buffer != whole))
        assert len(wrong) == 0, f"byte {wrong[0]} depends on the range [{begin}, {end})"
        owner[written] = number


@given(data=st.data())
def test_packing_writes_every_byte(subject: Subject, data: st.DataObject) -> None:
    """What memory held before is no part of packed weights, not even of their padding."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, subject.variant.n_step), label="cuts")
    packed = []
    for poison in (0x5A, 0xA5):
        matrix.buffer[:] = poison
        for begin, end in pairwise(at):
            subject.repack(matrix, problem.source, begin, end)
        packed.append(matrix.buffer.copy())
    left = np.flatnonzero(packed[0] != packed[1])
    assert len(left) == 0, (
        f"packing left {len(left)} of {matrix.nbytes} bytes as they were, the first is byte"
        f" {left[0]}: ranges that cover all rows must write all of them, padding included"
    )


@given(data=st.data())
def test_unpacking_a_range_is_a_part_of_unpacking_all(
    subject: Subject, data: st.DataObject
) -> None:
    """unpack(begin, end) returns the rows that unpack() has there, wherever these begin and end."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, 1), label="cuts")
    parts = [matrix.unpack(begin, end) for begin, end in pairwise(at)]
    bounds.check_same_bits(np.concatenate(parts), matrix.unpack(), "unpacked ranges")


@given(data=st.data())
def test_exported_weights_are_the_same_when_packed_again(
    subject: Subject, data: st.DataObject
) -> None:
    """What was quantised while it was packed can be written down as a checkpoint has it."""
    if not subject.variant.exports:
        pytest.skip("the backend does not export weights")
    taken = [pair.given for pair in strategies.conversions(subject.backend, lambda pair: pair.kept)]
    pairs = strategies.conversions(subject.backend, lambda pair: pair.stored in taken)
    if not pairs:
        pytest.skip("no format that is stored is taken as it is")
    source = data.draw(strategies.sources(subject.backend, subject.variant, pairs))
    matrix = subject.pack(source)
    assume(strategies.Conversion(source.stored, source.stored).fill_bytes(matrix.k) == matrix.k)
    made = from_bytes(source.stored, *matrix.exported())
    exported = formats.Source(
        made.format, made.format, made.data, made.scale, made.zero, source.values
    )
    again = subject.pack(exported)
    bounds.check_same_bits(again.unpack(), matrix.unpack(), "weights packed from what was exported")
    for part, first, second in zip(
        ("data", "scale", "zero"), matrix.exported(), again.exported(), strict=True
    ):
        bounds.check_same_bits(second, first, f"{part} exported again")


@given(data=st.data())
def test_exporting_a_range_is_a_part_of_exporting_all(
    subject: Subject, data: st.DataObject
) -> None:
    """Ranges of whole steps and groups write their rows of a target, whose rows may lie apart."""
    if not subject.variant.exports:
        pytest.skip("the backend does not export weights")
    source = data.draw(strategies.sources(subject.backend, subject.variant))
    matrix = subject.pack(source)
    group = source.stored.group_n or (1 if source.stored.scale == "none" else matrix.n)
    step = math.lcm(subject.variant.n_step, group)
    at = data.draw(strategies.cuts(matrix.n, step), label="cuts")
    parts = zip(matrix.exported(at, 64), matrix.exported(), strict=True)
    for part, (ranges, whole) in zip(("data", "scale", "zero"), parts, strict=True):
        bounds.check_same_bits(ranges, whole, f"{part} exported in ranges {at}")


@given(data=st.data())
def test_variants_of_one_layout_read_each_others_weights(
    subject: Subject, data: st.DataObject
) -> None:
    """Packed weights outlive the machine that packed them."""
    variant = subject.variant
    others = [
        other
        for other in subject.backend.variants
        if other.layout == variant.layout and other.name != variant.name and other.runnable
    ]
    if not others:
        pytest.skip("no other variant with this layout can run here")
    other = Subject(subject.backend, data.draw(st.sampled_from(others), label="other"))
    problem = data.draw(strategies.problems(subject.backend, variant))
    matrix, foreign = subject.pack(problem.source), other.pack(problem.source)
    assert matrix.nbytes == foreign.nbytes
    expected = matrix.matmul(problem.act)
    matrix.buffer[:] = foreign.buffer
    bounds.check_same_bits(matrix.unpack(), foreign.unpack(), "unpacked weight")
    bounds.check_same_bits(matrix.matmul(problem.act), expected, f"weights of {other.variant.name}")


@given(data=st.data())
def test_packed_bytes_are_told_from_others(subject: Subject, data: st.DataObject) -> None:
    """What a file may hold in place of packed bytes is refused, or is a matrix like any other."""
    if not subject.variant.checks_packed:
        pytest.skip("files keep rows of this backend")
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    whole = matrix.buffer.copy()
    bounds.check_same_bits(subject.of_bytes(whole, matrix).unpack(), matrix.unpack(), "read again")
    for size in (0, len(whole) - 64, len(whole) + 64):
        with pytest.raises(ValueError, match="bytes are no weight"):
            subject.of_bytes(np.resize(whole, size), matrix)
    places = st.integers(0, len(whole) - 1)
    for at in data.draw(st.lists(places, min_size=1, max_size=8), label="damaged bytes"):
        whole[at] ^= data.draw(st.integers(1, 255))
    try:
        damaged = subject.of_bytes(whole, matrix)
    except ValueError:
        return
    damaged.exported()
    damaged.matmul(problem.act)


# --- activation codec ---------------------------------------------------------------------------


@given(data=st.data())
def test_activations_keep_the_precision_of_their_format(
    subject: Subject, data: st.DataObject
) -> None:
    """Encoding a row loses no more than half a step of what is stored."""
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    kinds = strategies.CODEC_KINDS
    act = data.draw(strategies.matrices(problem.act.shape, kinds, "act"))
    matrix = subject.pack(problem.source)
    bound = formats.codec_bound(matrix.act, np.abs(act.astype(np.float64)))
    encoded = matrix.act_round_trip(act)
    bounds.check(encoded, act, bound, "unpacked activation")


@given(data=st.data())
def test_activations_may_be_packed_in_parts(subject: Subject, data: st.DataObject) -> None:
    """Any cut of the depth at k_step gives the same activations and the same products."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    whole = matrix.pack_act(problem.act)
    at = data.draw(strategies.cuts(matrix.k, subject.variant.k_step), label="cuts")
    m = len(problem.act)
    parts = whole.copy()
    parts[:m] = 0xFF
    for begin, end in data.draw(st.permutations(list(pairwise(at))), label="order"):
        matrix.pack_act_range(problem.act, begin, end, parts)
    bounds.check_same_bits(matrix.unpack_act(parts, m), matrix.unpack_act(whole, m), "activations")
    bounds.check_same_bits(subject.run(matrix, parts, m), subject.run(matrix, whole, m), "dst")


@given(data=st.data())
def test_activations_depend_on_their_format_only(subject: Subject, data: st.DataObject) -> None:
    """Rows that were packed for one weight may meet another one that wants the same format."""
    if not subject.variant.has_act_format:
        pytest.skip("activations do not depend on weights")
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix, k = subject.pack(problem.source), problem.act.shape[1]

    def fits(pair: strategies.Conversion) -> bool:
        return k % pair.fill_bytes(1) == 0 and subject.act_of(pair.stored) == matrix.act

    others = strategies.conversions(subject.backend, fits)
    # Another format shows more than other weights of the same one.
    others = [pair for pair in others if pair.stored != problem.source.stored] or others
    pair = data.draw(st.sampled_from(others), label="other conversion")
    values = data.draw(strategies.matrices(problem.source.values.shape, label="other weight"))
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of other codes"))
    other = subject.pack(formats.make_source(pair.given, values, rng, pair.stored, at_edges=True))
    assert other.act_size == matrix.act_size, f"rows for {pair.stored} have another size"
    act, m = matrix.pack_act(problem.act), len(problem.act)
    what = f"{pair.stored} with activations that were packed for {matrix.format}"
    bounds.check_same_bits(subject.run(other, act, m), other.matmul(problem.act), what)
