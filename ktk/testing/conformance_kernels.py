"""Properties of every backend, whoever wrote it: its micro-kernels, and the memory it touches.

See `conformance_codecs` for the arguments of properties.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ktk import _core
from ktk.testing import bounds, formats, strategies
from ktk.testing.subject import Subject, choose, round_up

#: A NaN that no computation makes, so that a write into a guarded place shows.
POISON = np.uint32(0x7FA5A5A5)


def test_products_are_as_exact_as_float32(subject: Subject, pair: strategies.Conversion) -> None:
    """Given what is stored, the product has the error of one float32 dot product."""

    @strategies.share_examples(strategies.conversions(subject.backend))
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
    height, width = round_up(m, variant.m_step), round_up(end - begin, variant.n_step)
    around = np.full((height + 2 * guard, round_up(width, 16) + guard), POISON).view(np.float32)
    inside = around[guard : guard + height]
    matrix.run_raw(act, m, begin, end, inside, choose(variant, m))

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
    bounds.check_same_bits(subject.run(matrix, act, m), subject.run(matrix, clean, m), "dst")


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
    column = data.draw(st.integers(0, matrix.k - 1), label="column")
    act = problem.act.copy()
    act[row, column] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]), label="value")
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
def test_infinite_weights_stay_in_their_columns(subject: Subject, data: st.DataObject) -> None:
    """An infinite weight is kept, leaves its column nothing finite, and all others their bits."""
    pairs = strategies.conversions(
        subject.backend, lambda pair: pair.kept and formats.has_infinity(pair.given)
    )
    if not pairs:
        pytest.skip("no format that is stored as it is given has an infinity")
    problem = data.draw(
        strategies.problems(subject.backend, subject.variant, ("normal", "sparse"), pairs)
    )
    n, k = problem.source.values.shape
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    value = data.draw(st.sampled_from([np.inf, -np.inf]), label="value")

    sound = subject.pack(problem.source)
    matrix = subject.pack(formats.with_infinity(problem.source, row, column, value))
    unpacked = sound.unpack()
    unpacked[row, column] = value
    bounds.check_same_bits(matrix.unpack(), unpacked, "unpacked weight with an infinity")
    result, others = matrix.matmul(problem.act), np.arange(n) != row
    expected = sound.matmul(problem.act)[:, others]
    bounds.check_same_bits(result[:, others], expected, f"columns beside column {row}")
    # Zero times infinity is a NaN.
    assert not np.isfinite(result[:, row]).any(), f"column {row} is finite: {result[:, row]}"


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


@given(data=st.data())
def test_registers_of_the_caller_are_kept(subject: Subject, data: st.DataObject) -> None:
    """A product keeps to the calling convention, and leaves vectors and tiles in a clean state."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    matrix = subject.pack(problem.source)
    at = data.draw(strategies.cuts(matrix.n, subject.variant.n_step), label="cuts")
    for number, (_, m_max) in enumerate(subject.variant.ukernels):
        for begin, end in pairwise(at):
            matrix.check_registers(problem.act[:m_max], begin, end, number)


@given(data=st.data())
def test_a_matrix_may_be_packed_again(subject: Subject, data: st.DataObject) -> None:
    """Another weight in the same memory leaves nothing of the one that was multiplied before."""
    problem = data.draw(strategies.problems(subject.backend, subject.variant))
    one = problem.source
    kinds = data.draw(st.sampled_from([strategies.KINDS, ("zero",)]), label="kinds of the other")
    values = data.draw(strategies.matrices(one.values.shape, kinds, "the other weight"))
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="seed of other codes"))
    other = formats.make_source(one.format, values, rng, one.stored, at_edges=True)
    # Memory of the larger one holds either.
    packed = [(subject.pack(source), source) for source in (one, other)]
    packed.sort(key=lambda pair: pair[0].nbytes)
    (fresh, source), (matrix, _) = packed
    matrix.matmul(problem.act)
    subject.repack(matrix, source, 0, matrix.n)
    bounds.check_same_bits(matrix.matmul(problem.act), fresh.matmul(problem.act), "product")
    bounds.check_same_bits(matrix.unpack(), fresh.unpack(), "unpacked weight")


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operand", _core.PackedMatrix.GUARDS)
def test_memory_is_as_large_as_the_table_says(subject: Subject, operand: str) -> None:
    """Nothing beside an operand is touched, and nothing of it is read before it was written.

    Behind the operand is a page that nobody may touch: a signal in this property means that its
    size in the table is too small, or that a function goes too far.
    """

    @strategies.share_examples(_core.PackedMatrix.GUARDS)
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
