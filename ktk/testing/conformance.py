"""Properties of every backend, whoever wrote it: codecs and micro-kernels.

The plugin supplies `subject`, a backend and a variant; `pair`, each format that the backend accepts
with one that it stores it as; or `kept`, those that are stored as they are given. Without these,
examples draw their formats. These are plain functions on purpose: Hypothesis refuses a `@given`
method that several classes inherit.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ktk import _core
from ktk.quantize import from_bytes
from ktk.testing import bounds, formats, strategies
from ktk.testing.subject import Subject

#: A NaN that no computation makes, so that a write into a guarded place shows.
POISON = np.uint32(0x7FA5A5A5)

#: Examples of a single pair of formats, however many a backend has.
FEWEST = 4


def _share(subject: Subject) -> settings:
    """Examples of one pair of formats, so that all pairs together get what a property gets."""
    pairs = len(strategies.conversions(subject.backend))
    return settings(max_examples=max(settings().max_examples // pairs, FEWEST))


def _round_up(size: int, step: int) -> int:
    return -(-size // step) * step


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

    @_share(subject)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        kinds = strategies.CODEC_KINDS
        source = data.draw(strategies.sources(subject.backend, subject.variant, [kept], kinds))
        unpacked = subject.pack(source).unpack()
        assert unpacked.dtype == np.float32
        bounds.check(unpacked, source.values.astype(np.float32), 0.0, "unpacked weight")

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
        f"pack_weight left {len(left)} of {matrix.nbytes} bytes as they were, the first is byte"
        f" {left[0]}: ranges that cover all rows must write all of weight_size, padding included"
    )


@given(data=st.data())
def test_unpacking_a_range_is_a_part_of_unpacking_all(
    subject: Subject, data: st.DataObject
) -> None:
    """unpack(begin, end) returns the rows that unpack() has there."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, subject.variant.n_step), label="cuts")
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
    bounds.check_same_bits(_run(matrix, subject, parts, m), _run(matrix, subject, whole, m), "dst")


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
    pair = data.draw(st.sampled_from(others), label="other conversion")
    values = data.draw(strategies.matrices(problem.source.values.shape, label="other weight"))
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of other codes"))
    other = subject.pack(formats.make_source(pair.given, values, rng, pair.stored))
    assert other.act_size == matrix.act_size, f"rows for {pair.stored} have another size"
    act, m = matrix.pack_act(problem.act), len(problem.act)
    what = f"{pair.stored} with activations that were packed for {matrix.format}"
    bounds.check_same_bits(_run(other, subject, act, m), other.matmul(problem.act), what)


# --- micro-kernels ------------------------------------------------------------------------------


def _choose(variant: _core.VariantInfo, m: int) -> int:
    """The micro-kernel for m rows, as the core chooses it."""
    return next(i for i, (_, m_max) in enumerate(variant.ukernels) if m <= m_max)


def _run(
    matrix: _core.PackedMatrix, subject: Subject, act: npt.NDArray[np.uint8], m: int
) -> strategies.F32:
    """Multiply packed activations with the whole matrix."""
    variant = subject.variant
    width = _round_up(_round_up(matrix.n, variant.n_step), 16)
    dst = np.zeros((_round_up(m, variant.m_step), width), np.float32)
    matrix.run_raw(act, m, 0, matrix.n, dst, _choose(variant, m))
    return dst[:m, : matrix.n]


def test_products_are_as_exact_as_float32(subject: Subject, pair: strategies.Conversion) -> None:
    """Given what is stored, the product has the error of one float32 dot product."""

    @_share(subject)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        problem = data.draw(strategies.problems(subject.backend, subject.variant, pairs=[pair]))
        matrix = subject.pack(problem.source)
        exact, bound = subject.product(matrix, problem)
        bounds.check(matrix.matmul(problem.act), exact, bound, "product")

    holds()


@given(data=st.data())
def test_rows_are_independent_of_their_batch(subject: Subject, data: st.DataObject) -> None:
    """A micro-kernel gives a token the same bits alone and in any batch."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    for number, (name, m_max) in enumerate(subject.variant.ukernels):
        act = problem.act[:m_max]
        batch = matrix.matmul(act, ukernel=number)
        single = [matrix.matmul(row[np.newaxis], ukernel=number) for row in act]
        bounds.check_same_bits(np.concatenate(single), batch, f"{name}, rows one by one")
        upside_down = matrix.matmul(np.ascontiguousarray(act[::-1]), ukernel=number)
        bounds.check_same_bits(upside_down[::-1], batch, f"{name}, rows in reverse order")


@given(data=st.data())
def test_micro_kernels_agree(subject: Subject, data: st.DataObject) -> None:
    """Which micro-kernel computed a row cannot be seen in its bits."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    last = len(subject.variant.ukernels) - 1
    for number, (name, m_max) in enumerate(subject.variant.ukernels[:last]):
        act = problem.act[:m_max]
        expected = matrix.matmul(act, ukernel=last)
        bounds.check_same_bits(matrix.matmul(act, ukernel=number), expected, f"micro-kernel {name}")


@given(data=st.data())
def test_columns_may_be_cut_anywhere(subject: Subject, data: st.DataObject) -> None:
    """Any cut of the output columns at n_step gives the same bits."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, subject.variant.n_step), label="cuts")
    parts = [matrix.matmul(problem.act, begin, end) for begin, end in pairwise(at)]
    bounds.check_same_bits(np.concatenate(parts, axis=1), matrix.matmul(problem.act), f"cuts {at}")


@given(data=st.data())
def test_nothing_outside_the_range_is_touched(subject: Subject, data: st.DataObject) -> None:
    """A product writes whole steps of its own range, and reads its inputs only."""
    variant = subject.variant
    problem = data.draw(strategies.problems(subject.backend, variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, variant.n_step), label="cuts")
    begin, end = data.draw(st.sampled_from(list(pairwise(at))), label="range")
    m = len(problem.act)
    act = matrix.pack_act(problem.act)
    weight_before = matrix.buffer.copy()

    guard = 16
    height, width = _round_up(m, variant.m_step), _round_up(end - begin, variant.n_step)
    around = np.full((height + 2 * guard, _round_up(width, 16) + guard), POISON).view(np.float32)
    inside = around[guard : guard + height]
    matrix.run_raw(act, m, begin, end, inside, _choose(variant, m))

    touched = around.view(np.uint32) != POISON
    touched[guard : guard + height, :width] = False
    where = np.argwhere(touched)
    assert len(where) == 0, (
        f"a product of {m} rows and columns [{begin}, {end}) wrote row {where[0][0] - guard},"
        f" column {begin + where[0][1]}"
    )
    assert np.array_equal(matrix.buffer, weight_before), "a micro-kernel changed its weights"


@given(data=st.data())
def test_padding_rows_may_hold_anything(subject: Subject, data: st.DataObject) -> None:
    """Rows of activations between m and m rounded up to m_step are never part of a result."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    m = len(problem.act)
    act = matrix.pack_act(problem.act)
    clean = act.copy()
    clean[m:] = 0
    act[m:] = 0xFF
    bounds.check_same_bits(_run(matrix, subject, act, m), _run(matrix, subject, clean, m), "dst")


@given(data=st.data())
def test_nan_and_infinity_stay_in_their_row(subject: Subject, data: st.DataObject) -> None:
    """A row that is not finite leaves the bits of all others alone."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    assume(len(problem.act) > 1)
    matrix = subject.pack(problem.source)
    expected = matrix.matmul(problem.act)
    row = data.draw(st.integers(0, len(problem.act) - 1), label="row")
    column = data.draw(st.integers(0, matrix.k - 1), label="column")
    act = problem.act.copy()
    act[row, column] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]), label="value")
    others = np.arange(len(act)) != row
    result = matrix.matmul(act)
    bounds.check_same_bits(result[others], expected[others], f"rows beside row {row}")


@given(data=st.data())
def test_nan_is_not_lost(subject: Subject, data: st.DataObject) -> None:
    """A row with a NaN or an infinity has no finite result."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant, ("normal",)))
    matrix = subject.pack(problem.source)
    row = data.draw(st.integers(0, len(problem.act) - 1), label="row")
    act = problem.act.copy()
    act[row, 0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]), label="value")
    result = matrix.matmul(act)[row]
    # Zero times infinity is a NaN: no weight can hide it.
    assert not np.isfinite(result).any(), f"row {row} became finite: {result}"


@given(data=st.data())
def test_nan_weights_stay_in_their_columns(subject: Subject, data: st.DataObject) -> None:
    """A weight or a scale that is NaN makes NaN of the columns it stands for, and of no other."""

    def has_nan(pair: strategies.Conversion) -> bool:
        return pair.kept and bool(formats.nan_places(pair.given))

    pairs = strategies.conversions(subject.backend, has_nan)
    if not pairs:
        pytest.skip("no format that is stored as it is given has a NaN")
    problem = data.draw(
        strategies.problems(subject.backend, subject.variant, ("normal", "sparse"), pairs)
    )
    source = problem.source
    n, k = source.values.shape
    place = data.draw(st.sampled_from(formats.nan_places(source.format)), label="place")
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    spoiled = formats.with_nan(source, place, row, column)
    lost = np.isnan(spoiled.values)

    sound, matrix = subject.pack(source), subject.pack(spoiled)
    unpacked = np.where(lost, np.float32(np.nan), sound.unpack())
    bounds.check_same_bits(matrix.unpack(), unpacked, f"unpacked weight with a NaN in its {place}")
    expected = sound.matmul(problem.act)
    expected[:, lost.any(axis=1)] = np.nan
    what = f"product with a NaN in the {place} of column {row}"
    bounds.check_same_bits(matrix.matmul(problem.act), expected, what)


@given(data=st.data())
def test_variants_agree(subject: Subject, data: st.DataObject) -> None:
    """Two variants differ by no more than the sum of what each may lose."""
    others = [o for o in subject.backend.variants if o.runnable and o.name != subject.variant.name]
    if not others or subject.unknown_act:
        pytest.skip("no other variant can run here")
    other = Subject(subject.backend, data.draw(st.sampled_from(others), label="other"))
    problem = data.draw(
        strategies.problems(subject.backend, subject.variant, strategies.ROUNDED_KINDS)
    )
    mine, theirs = subject.pack(problem.source), other.pack(problem.source)
    bounds.check_same_bits(theirs.unpack(), mine.unpack(), "stored weight")
    bound = subject.reach(mine, problem) + other.reach(theirs, problem)
    result, expected = mine.matmul(problem.act), theirs.matmul(problem.act)
    bounds.check(result, expected, bound, f"{subject.variant.name} against {other.variant.name}")


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", _core.PackedMatrix.GUARDS)
def test_memory_is_as_large_as_the_table_says(subject: Subject, operand: str) -> None:
    """Nothing beside an operand is touched, and nothing of it is read before it was written.

    Behind the operand is a page that nobody may touch: a signal in this property means that its
    size in the table is too small, or that a function goes too far.
    """
    examples = max(settings().max_examples // len(_core.PackedMatrix.GUARDS), FEWEST)

    @settings(max_examples=examples)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        problem = data.draw(strategies.problems(subject.backend, subject.variant))
        plain = subject.pack(problem.source)
        guarded = subject.pack(problem.source, guard=operand)
        ranges = list(pairwise(data.draw(strategies.cuts(plain.n, subject.variant.n_step), "cuts")))
        depths = list(pairwise(data.draw(strategies.cuts(plain.k, subject.variant.k_step), "cuts")))
        for begin, end in ranges:
            subject.repack(guarded, problem.source, begin, end)
        for begin, end in [(0, plain.n), *ranges]:
            expected = plain.unpack(begin, end)
            bounds.check_same_bits(guarded.unpack(begin, end), expected, "unpacked weight")
        if subject.variant.exports:
            for mine, theirs in zip(guarded.exported(), plain.exported(), strict=True):
                bounds.check_same_bits(mine, theirs, "exported weight")
        packed = guarded.pack_act(problem.act)
        for begin, end in depths:
            guarded.pack_act_range(problem.act, begin, end, packed)
        expected = plain.act_round_trip(problem.act)
        decoded = guarded.unpack_act(packed, len(problem.act))
        bounds.check_same_bits(decoded, expected, "activations")
        for number, (name, m_max) in enumerate(subject.variant.ukernels):
            act = problem.act[:m_max]
            for begin, end in ranges:
                expected = plain.matmul(act, begin, end, number)
                result = guarded.matmul(act, begin, end, number)
                bounds.check_same_bits(result, expected, f"micro-kernel {name}")

    holds()
