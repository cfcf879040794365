"""Properties of a dense layer that is computed with a backend, through ``ktk.Linear``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ktk
from ktk.dtypes import FLOAT_DTYPES
from ktk.testing import bounds, dense, formats, strategies
from ktk.testing.dense import Dense
from ktk.testing.strategies import F32
from ktk.testing.subject import Subject


def _call(linear: ktk.Linear, x: F32) -> F32:
    result = np.asarray(linear(x))
    assert result.dtype == np.float32
    assert result.shape == (*x.shape[:-1], linear.out_features)
    return result


def _draw(
    subject: Subject, data: st.DataObject, least: int = 0, extent: str = ""
) -> tuple[Dense, F32]:
    if subject.unknown_act:
        pytest.skip(f"the kit does not know {subject.unknown_act}")
    drawn = dense.layers(subject.backend, subject.variant, extent)
    layer = data.draw(drawn, label="layer")
    return layer, data.draw(dense.inputs(layer, least, extent), label="inputs")


@given(data=st.data())
def test_dense_layer_is_within_the_propagated_bound(subject: Subject, data: st.DataObject) -> None:
    """A dense layer differs from float64 by no more than its codecs and roundings explain."""
    layer, x = _draw(subject, data)
    linear = layer.make(subject)
    expected = layer.expected(subject, linear, x)
    bounds.check(_call(linear, x), expected.value, expected.error, "output")


@pytest.mark.parametrize("extent", dense.EXTENTS)
@settings(max_examples=strategies.FEWEST)
@given(data=st.data())
def test_a_layer_may_be_as_large_as_those_of_models(
    subject: Subject, extent: str, data: st.DataObject
) -> None:
    """What small matrices do not show: offsets that overflow, and blocks of each extent."""
    layer, x = _draw(subject, data, least=1, extent=extent)
    linear = layer.make(subject)
    expected = layer.expected(subject, linear, x)
    bounds.check(_call(linear, x), expected.value, expected.error, "output")


@given(data=st.data())
def test_any_number_of_threads_gives_the_same_bits(subject: Subject, data: st.DataObject) -> None:
    """Threads share the work, not the rounding."""
    layer, x = _draw(subject, data)
    one = _call(layer.make(subject, threads=1), x)
    for threads in (2, 3):
        result = _call(layer.make(subject, threads=threads), x)
        bounds.check_same_bits(result, one, f"{threads} threads")


@given(data=st.data())
def test_a_row_has_the_same_bits_beside_any_others(subject: Subject, data: st.DataObject) -> None:
    """A row's result has the same bits wherever it stands, and beside whatever rows."""
    layer, x = _draw(subject, data, least=1)
    linear = layer.make(subject)
    rng = np.random.default_rng(data.draw(strategies.seeds(), label="order"))
    count = data.draw(st.integers(1, len(x)), label="rows kept")
    order = rng.permutation(len(x))[:count]
    bounds.check_same_bits(_call(linear, x[order]), _call(linear, x)[order], "chosen rows")


@given(data=st.data())
def test_parts_share_nothing_but_the_input(subject: Subject, data: st.DataObject) -> None:
    """Parts of a weight give the bits, and hold the values, that each of them has alone."""
    layer, x = _draw(subject, data)
    fused = layer.make(subject, shards=1)
    result, weight, row = _call(fused, x), fused.unpack(), 0
    for number, part in enumerate(layer.parts):
        alone = layer.make(subject, shards=1, only=number)
        rows = slice(row, row + len(part.values))
        row = rows.stop
        bounds.check_same_bits(weight[rows], alone.unpack(), f"weight of part {number}")
        bounds.check_same_bits(result[:, rows], _call(alone, x), f"part {number}")


@given(data=st.data())
def test_shards_agree(subject: Subject, data: st.DataObject) -> None:
    """Any number of shards is a layer, of the very weight where that is stored as given."""
    layer, x = _draw(subject, data)
    whole = layer.make(subject, shards=1).unpack()
    widest = max(len(part.values) for part in layer.parts)
    for shards in range(1, min(3, -(-widest // strategies.LEAST_COLUMNS)) + 1):
        linear = layer.make(subject, shards=shards)
        assert linear.shards == shards
        expected = layer.expected(subject, linear, x)
        bounds.check(_call(linear, x), expected.value, expected.error, f"{shards} shards")
        if layer.kept:
            bounds.check_same_bits(linear.unpack(), whole, f"weight in {shards} shards")


@given(data=st.data())
def test_rows_are_looked_up(subject: Subject, data: st.DataObject) -> None:
    """Rows of the packed weight are those that it is unpacked to, rounded to what is asked for."""
    layer, _ = _draw(subject, data)
    linear = layer.make(subject)
    ids = data.draw(st.lists(st.integers(0, layer.shape[0] - 1), max_size=40), label="ids")
    wanted = linear.unpack()[ids]
    bounds.check_same_bits(linear.rows(ids), wanted, "rows")
    halves = torch.empty(wanted.shape, dtype=torch.bfloat16, device="cpu")
    linear.rows(ids, out=halves)
    bounds.check_same_bits(
        halves.float().numpy(), torch.from_numpy(wanted).bfloat16().float().numpy(), "bf16 rows"
    )


@given(data=st.data())
def test_dtypes_and_strides_of_the_caller(subject: Subject, data: st.DataObject) -> None:
    """Inputs and outputs of any dtype, in rows with something between them, mean the same."""
    layer, given_x = _draw(subject, data)
    element = data.draw(st.sampled_from(sorted(FLOAT_DTYPES)), label="dtype")
    linear = layer.make(subject)
    rows, columns = len(given_x), linear.out_features
    x = torch.from_numpy(np.clip(given_x, -60000, 60000)).to(FLOAT_DTYPES[element])
    result = linear(x)
    assert result.dtype == x.dtype
    expected = layer.expected(subject, linear, x.float().numpy(), element)
    got = formats.as_float64(result)
    bounds.check(got, expected.value, expected.error, f"output as {element}")
    wide = torch.full((rows, columns + 8), torch.nan, dtype=x.dtype, device="cpu")
    apart = torch.full((rows, x.shape[1] + 3), torch.nan, dtype=x.dtype, device="cpu")
    apart[:, :-3] = x
    linear(apart[:, :-3], out=wide[:, 4:-4])
    bounds.check_same_bits(wide[:, 4:-4].float().numpy(), result.float().numpy(), "strided output")
    assert torch.isnan(wide[:, :4]).all(), "columns before `out` were written"
    assert torch.isnan(wide[:, -4:]).all(), "columns behind `out` were written"


@given(data=st.data())
def test_nan_stays_in_its_row(subject: Subject, data: st.DataObject) -> None:
    """A row that is not finite leaves all others alone."""
    layer, x = _draw(subject, data, least=2)
    linear = layer.make(subject)
    expected = _call(linear, x)
    row = data.draw(st.integers(0, len(x) - 1), label="row")
    column = data.draw(st.integers(0, x.shape[1] - 1), label="column")
    x = x.copy()
    x[row, column] = data.draw(st.sampled_from([np.nan, np.inf]), label="value")
    result = _call(linear, x)
    others = np.arange(len(x)) != row
    bounds.check_same_bits(result[others], expected[others], f"rows beside row {row}")
    if np.isnan(x[row, column]):
        assert np.isnan(result[row]).all(), f"row {row} lost its NaN"


@given(data=st.data())
def test_submitted_work_gives_the_same_bits(subject: Subject, data: st.DataObject) -> None:
    """A ticket holds what a call returns, whatever happens to the input meanwhile."""
    layer, x = _draw(subject, data)
    linear = layer.make(subject)
    expected = _call(linear, x)
    x = x.copy()
    ticket = linear.submit(x)
    x.fill(0)
    bounds.check_same_bits(np.asarray(ticket.wait()), expected, "result of the ticket")
    assert ticket.done
