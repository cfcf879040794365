"""Columns in another order: what GPTQ's desc_act sorts is computed in its codes.

An expert whose columns are sorted is, for a token, the same expert without an order, given the
token's columns sorted and its rows of gate and up where down has its columns: bit by bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ordered import (
    FORMATS,
    ORDERED,
    SIZES,
    UNGATED,
    E,
    H,
    I,
    K,
    chosen,
    expert,
    layer,
    matrix,
    permutation,
    plain,
)

import ktk
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.expert import Expert, Matrix
from ktk.loading.cut import cut_columns, cut_expert
from ktk.quantize import dequantize, quantize
from ktk.training import linear_backward


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("ordered", ["x of each expert", "down only", "x only"])
@pytest.mark.parametrize("backend", FORMATS)
def test_sorted_columns_are_those_of_sorted_tokens(backend: str, ordered: str, tokens: int) -> None:
    experts = [expert(FORMATS[backend], e, ORDERED[ordered]) for e in range(E)]
    moe, without = layer(backend, experts), layer(backend, [plain(one) for one in experts])
    hidden, ids, weights = chosen(tokens)
    y = moe(hidden, ids, weights)
    # One expert at a time, in the order of experts, as the layer adds up.
    want, terms = torch.zeros_like(y), torch.zeros_like(y)
    for e, one in enumerate(experts):
        order = one.gate.order if one.gate is not None else None
        x = hidden if order is None else hidden[:, order.long()].contiguous()
        single = torch.where(ids == e, ids, -1)
        alone = torch.where(ids == e, weights, torch.zeros_like(weights))
        term = without(x, single, alone)
        want += term
        terms += term.abs()
    # f32: the layer multiplies and adds in one step, which rounds once where there were two.
    assert ((y - want).abs() <= 2 * K * 2**-24 * terms).all()
    if ordered == "down only":
        assert torch.equal(y, without(hidden, ids, weights))
    # One choice is no sum: bit by bit.
    for e in range(E):
        gate = experts[e].gate
        assert gate is not None
        order = gate.order
        x = hidden if order is None else hidden[:, order.long()].contiguous()
        single, weight = torch.full((tokens, 1), e), weights[:, :1].contiguous()
        assert torch.equal(moe(hidden, single, weight), without(x, single, weight))


def test_experts_that_share_an_order_encode_tokens_once_and_mean_the_same() -> None:
    first = expert("u4-f16-g32", 0, ORDERED["x only"]).gate
    assert first is not None
    assert first.order is not None
    experts = [expert("u4-f16-g32", e, ()) for e in range(E)]
    parts = [
        {
            part: replace(matrix, order=None if part == "down" else first.order)
            for part, matrix in one.matrices.items()
        }
        for one in experts
    ]
    moe = layer("RAWINT4", [Expert(**one) for one in parts])
    without = layer("RAWINT4", experts)
    hidden, ids, weights = chosen(40)
    x = hidden[:, first.order.long()].contiguous()
    assert torch.equal(moe(hidden, ids, weights), without(x, ids, weights))
    # Other experts change nothing of these: every expert has tokens encoded for itself now.
    moe.load_expert(E - 1, expert("u4-f16-g32", 9, ORDERED["x of each expert"], joint=False))
    known = ids.clamp(max=E - 2)
    assert torch.equal(moe(hidden, known, weights), without(x, known, weights))
    # And back.
    moe.leave_out(E - 1)
    assert torch.equal(moe(hidden, known, weights), without(x, known, weights))


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("joint", [True, False], ids=["gate as up", "gate and up"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    shards: int, threads: int, joint: bool
) -> None:
    experts = [expert("u4-bf16-zero-u8-g32", e, tuple(SIZES), joint=joint) for e in range(E)]
    pool = ktk.WorkerPool(threads)
    moe = layer("AMXINT4", experts, shards=shards, pool=pool)
    hidden, ids, weights = chosen(600)
    y = moe(hidden, ids, weights)
    for begin, end in ((0, 1), (1, 4), (4, 40), (40, 600)):
        part = moe(*(one[begin:end].contiguous() for one in (hidden, ids, weights)))
        assert torch.equal(part, y[begin:end])
    single = layer("AMXINT4", experts, shards=shards, pool=ktk.WorkerPool(1))
    assert torch.equal(single(hidden, ids, weights), y)


@pytest.mark.parametrize("ordered", ORDERED)
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("backend", FORMATS)
def test_unpacked_experts_are_as_they_were(backend: str, ordered: str, shards: int) -> None:
    one = expert(FORMATS[backend], 3, ORDERED[ordered], joint=False)
    moe = layer(backend, [one], shards=shards)
    for part, values in zip(SIZES, moe.unpack_expert(0), strict=True):
        np.testing.assert_array_equal(values, dequantize(one.matrices[part]).float())


def test_values_mean_what_the_order_says() -> None:
    one = quantize(torch.randn(4, 64), "u4-f16-g32")
    order = permutation(64, 1)
    values = dequantize(replace(one, order=order))
    for i, column in enumerate(order.tolist()):
        assert torch.equal(values[:, column], dequantize(one)[:, i])


def test_experts_without_a_gate_sort_their_tokens() -> None:
    experts = [expert("u4-f16-g32", e, tuple(UNGATED), sizes=UNGATED) for e in range(E)]
    moe = layer("RAWINT4", experts)
    without = layer("RAWINT4", [plain(one) for one in experts])
    hidden, ids, weights = chosen(40)
    y = moe(hidden, ids, weights)
    for e, one in enumerate(experts):
        assert one.up.order is not None
        x = hidden[:, one.up.order.long()].contiguous()
        single, weight = torch.full((40, 1), e), weights[:, :1].contiguous()
        assert torch.equal(moe(hidden, single, weight), without(x, single, weight))
        up, down = moe.unpack_expert(e)[-2:]
        np.testing.assert_array_equal(up, dequantize(one.up).float())
        np.testing.assert_array_equal(down, dequantize(one.down).float())
    for begin, end in ((0, 1), (1, 7), (7, 40)):
        rows = (one[begin:end].contiguous() for one in (hidden, ids, weights))
        assert torch.equal(moe(*rows), y[begin:end])


@pytest.mark.parametrize("joint", [True, False], ids=["gate as up", "gate and up"])
def test_a_layer_is_within_its_bound(joint: bool) -> None:
    """BF16 multiplies tokens that are rounded each by itself: their order matters to sums only."""
    experts = [expert("bf16", e, tuple(SIZES), joint=joint) for e in range(E)]
    moe = layer("BF16", experts)
    unsorted = layer(
        "BF16",
        [
            Expert(
                **{
                    part: Matrix(ktk.Format("bf16"), dequantize(m).bfloat16(), bias=m.bias)
                    for part, m in one.matrices.items()
                }
            )
            for one in experts
        ],
    )
    hidden, ids, weights = chosen(33)
    y, want = moe(hidden, ids, weights), unsorted(hidden, ids, weights)
    # Two orders of the same f32 sums, and what rounding h to bf16 makes of their difference.
    allowed = 2**-7 * want.abs().amax()
    assert ((y - want).abs() <= allowed).all()
    assert not torch.equal(y, want)


# --- dense layers -------------------------------------------------------------------------------


def parts(fmt: str) -> list[Matrix]:
    """q and k in one order, v in another, and one in none."""
    first, second = permutation(H, 1), permutation(H, 2)
    made = [matrix(fmt, (rows, H), rows) for rows in (96, 64, 32, 64)]
    return [
        replace(one, order=order)
        for one, order in zip(made, (first, first, second, None), strict=True)
    ]


def values(weight: list[Matrix]) -> torch.Tensor:
    return torch.cat([dequantize(one).float() for one in weight])


@pytest.mark.parametrize("tokens", [1, 30])
@pytest.mark.parametrize("backend", FORMATS)
def test_dense_layers_sort_their_input(backend: str, tokens: int) -> None:
    weight = parts(FORMATS[backend])
    linear = ktk.Linear(backend, H, 256).load(weight)
    x = torch.randn(tokens, H, generator=torch.Generator().manual_seed(3))
    for one, y in zip(weight, linear(x).split([96, 64, 32, 64], -1), strict=True):
        plain = ktk.Linear(backend, H, y.shape[1]).load(replace(one, order=None))
        sort = x if one.order is None else x[:, one.order.long()].contiguous()
        assert torch.equal(y, plain(sort))
    np.testing.assert_array_equal(linear.unpack(), values(weight))
    ids = torch.tensor([255, 0, 100, 170, 0])
    assert torch.equal(linear.rows(ids), values(weight)[ids])


@pytest.mark.parametrize("backend", [*FORMATS, "BF16Z"])
def test_files_of_dense_layers_keep_orders(backend: str, tmp_path: Path) -> None:
    weight = parts(FORMATS.get(backend, "bf16"))
    linear = ktk.Linear(backend, H, 256).load(weight)
    linear.save(tmp_path / "layer")
    again = ktk.Linear.from_file(tmp_path / "layer")
    np.testing.assert_array_equal(again.unpack(), values(weight))
    x = torch.randn(7, H)
    assert torch.equal(again(x), linear(x))


def test_a_reader_that_knows_no_orders_refuses_their_files(tmp_path: Path) -> None:
    """It would multiply sorted columns with columns that are not."""
    for name, weight in (("sorted", parts("bf16")), ("plain", [matrix("bf16", (256, H), 1)])):
        ktk.Linear("BF16", H, 256).load(weight).save(tmp_path / name)
        version = 2 if name == "sorted" else 1
        entry = TensorFile(tmp_path / name).metadata["ktk_linear"]
        assert json.loads(entry)["version"] == version


def test_gradients_of_dense_layers_are_of_columns_as_they_were() -> None:
    weight = parts("bf16")
    plain = [Matrix(ktk.Format("bf16"), dequantize(one).bfloat16().contiguous()) for one in weight]
    dy = torch.randn(20, 256)
    # Blocks of weights are restored before they are multiplied: bit by bit.
    got, want = (
        linear_backward(ktk.Linear("BF16", H, 256).load(one), dy, torch.empty(20, H))
        for one in (weight, plain)
    )
    assert torch.equal(got, want)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (torch.arange(H).int() // 2, "must have each of 0 to 191 once; 0 comes twice"),
        (torch.arange(H).int() + 1, "192 is none of them"),
        (-torch.arange(H).int(), "-1 is none of them"),
        (torch.arange(H - 1).int(), r"expected \(192\)|192"),
    ],
)
def test_what_is_no_order_is_refused(order: torch.Tensor, wanted: str) -> None:
    one = expert("bf16", 0, ())
    assert one.gate is not None
    moe = layer("BF16", [one])
    with pytest.raises(ValueError, match=wanted):
        moe.load_expert(0, replace(one, gate=replace(one.gate, order=order)))
    with pytest.raises(ValueError, match=wanted):
        ktk.Linear("BF16", H, I).load(replace(one.gate, order=order, bias=None))


@pytest.mark.parametrize(
    "order",
    [torch.arange(I).int() // 2, torch.arange(I).int() + 1, -torch.arange(I), torch.arange(I - 1)],
)
def test_rows_of_gate_and_up_need_an_order(order: torch.Tensor) -> None:
    one = expert("bf16", 0, ())
    moe = layer("BF16", [one])
    wanted = "down_order must be integers that have each of 0 to 159 once"
    for given in (order, order.numpy(), order.float()):
        with pytest.raises(ValueError, match=wanted):
            moe.load_expert(0, replace(one, down=replace(one.down, order=given)))
    hidden, _, weights = chosen(3)
    zeros = torch.zeros(3, 1, dtype=torch.int64)
    weights = weights[:, :1].contiguous()
    want = layer("BF16", [one])(hidden, zeros, weights)
    assert torch.equal(moe(hidden, zeros, weights), want)  # nothing is lost


def test_rows_that_share_scales_stay_where_they_are() -> None:
    made = {part: quantize(torch.randn(256, 256), "e4m3-f32-128x128") for part in SIZES}
    down = replace(made["down"], order=permutation(256, 1))
    moe = ktk.load_backend("FP8").moe(
        num_experts=1, num_experts_per_tok=1, hidden_size=256, intermediate_size=256
    )
    with pytest.raises(ValueError, match=r"128 rows of up share a scale .* give down without"):
        moe.load_expert(0, Expert(**{**made, "down": down}))
    # Where dtypes are to say the format, it is not known yet.
    unsaid = {
        part: Matrix(None, one.data.view(torch.float8_e4m3fn), one.scale)
        for part, one in made.items()
    }
    with pytest.raises(ValueError, match=r"rows of up share 2 rows of scales, .* give down with"):
        moe.load_expert(0, Expert(**{**unsaid, "down": replace(unsaid["down"], order=down.order)}))


# --- parts of experts ---------------------------------------------------------------------------


def test_ranks_have_parts_of_sorted_columns() -> None:
    """Columns of down go to ranks in their order, and the same rows of gate and up."""
    one = expert("u4-f16-g32", 2, tuple(SIZES), joint=False)
    assert one.down.order is not None
    order = one.down.order.long()
    for rank, (first, behind) in enumerate(((0, 64), (64, 160))):
        cut = cut_expert(one, first, behind, rank)
        assert cut.down.order is None
        there = order[first:behind]
        assert torch.equal(dequantize(cut.down), dequantize(one.down)[:, there])
        for part in ("gate", "up"):
            mine, whole = cut.matrices[part], one.matrices[part]
            assert torch.equal(dequantize(mine), dequantize(whole)[there])
            assert mine.bias is not None
            assert whole.bias is not None
            assert torch.equal(mine.bias, whole.bias[there])


def test_columns_of_a_sorted_matrix_are_cut_as_floats() -> None:
    one = replace(quantize(torch.randn(32, H), "u4-f16-g32"), order=permutation(H, 4))
    cut = cut_columns(one, 64, 128)
    assert cut.format == ktk.Format("f32")
    assert torch.equal(cut.data, dequantize(one)[:, 64:128])
