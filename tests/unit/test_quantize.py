"""Quantising floats by the standards' formulas: errors, edges, and what the kit decodes."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ktk import Format
from ktk.expert import Matrix
from ktk.quantize import Quantized, dequantize, quantize
from ktk.testing import bounds, formats, strategies

FORMATS = [
    Format("i8", "f32", "none", 1, 0),
    Format("u4", "bf16", "none", 1, 32),
    Format("u4", "f16", "none", 1, 64),
    Format("u4", "f32", "none", 1, 0),
    Format("i4", "bf16", "none", 1, 128),
    Format("u4", "f16", "u8", 1, 32),
    Format("u4", "bf16", "u8", 1, 128),
    Format("u4", "f16", "f16", 1, 64),
    Format("e4m3", "f32", "none", 128, 128),
    Format("e4m3", "f32", "none", 1, 0),
    Format("e4m3", "ue8m0", "none", 1, 32),
    Format("e5m2", "f32", "none", 1, 0),
    Format("e2m1", "ue8m0", "none", 1, 32),
    Format("e2m1", "e4m3", "none", 1, 16),
    Format("bf16"),
]
MX = [fmt for fmt in FORMATS if fmt.scale == "ue8m0"]
KINDS = ("normal", "zero", "sparse", "outlier", "powers", "uniform", "ties")


@st.composite
def matrices(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.integers(1, 140)), 2 * draw(st.integers(1, 140))
    return torch.from_numpy(draw(strategies.matrices(shape, KINDS)))


def decoded(q: Quantized) -> np.ndarray:
    return q.dequantize(torch.float64).numpy()


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@given(weight=matrices())
@settings(max_examples=40, deadline=None)
def test_the_error_is_that_of_the_format(fmt: Format, weight: torch.Tensor) -> None:
    values = weight.double().numpy()
    if fmt.scale == "f16":  # its range is too small for some kinds of values
        weight = weight.clamp(-1e4, 1e4)
        values = weight.double().numpy()
    q = quantize(weight, fmt)
    bounds.check(decoded(q), values, formats.codec_bound(fmt, np.abs(values)), "dequantised")
    assert not decoded(q)[values == 0].any(), "zero stays zero"


@pytest.mark.parametrize("fmt", FORMATS[:-1], ids=str)
@given(seed=st.integers(0, 99), shape=st.tuples(st.integers(1, 140), st.integers(1, 140)))
@settings(max_examples=20, deadline=None)
def test_arrays_are_those_that_the_kit_makes(fmt: Any, seed: int, shape: tuple[int, int]) -> None:
    """Same types, shapes and values: dequantize reads what the kit's own encoder wrote."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((shape[0], 2 * shape[1])).astype(np.float32)
    source = formats.make_source(fmt, values, rng)
    arrays: dict[str, Any] = {
        name: None if array is None else torch.as_tensor(array)
        for name in ("data", "scale", "zero")
        for array in [getattr(source, name)]
    }
    made = quantize(torch.from_numpy(values), fmt)
    for name, array in arrays.items():
        got = getattr(made, name)
        assert (got is None) == (array is None)
        if array is not None:
            assert (got.shape, got.dtype, got.is_contiguous()) == (array.shape, array.dtype, True)
    np.testing.assert_array_equal(decoded(Quantized(fmt, **arrays)), source.values)


@pytest.mark.parametrize("fmt", MX, ids=str)
@given(weight=matrices())
@settings(max_examples=40, deadline=None)
def test_what_an_mx_format_holds_it_holds_exactly(fmt: Format, weight: torch.Tensor) -> None:
    once = quantize(weight, fmt)
    again = quantize(once.dequantize(), fmt)
    np.testing.assert_array_equal(decoded(again), decoded(once))


@pytest.mark.parametrize("fmt", FORMATS[:8], ids=str)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero", "tiny"])
def test_a_search_finds_no_worse_scales(fmt: Format, kind: str) -> None:
    weight = torch.from_numpy(strategies.fill(kind, (33, 258), np.random.default_rng(1)))
    plain, found = quantize(weight, fmt), quantize(weight, fmt, search=True)
    assert found.format == plain.format

    def norm(q: Quantized) -> np.ndarray:
        return formats.group_norm(fmt, decoded(q) - weight.double().numpy())

    assert (norm(found) <= norm(plain) * (1 + 1e-6)).all()
    if kind == "normal" and fmt.element != "i8":  # of many levels, the extremes need few
        assert norm(found).sum() < 0.97 * norm(plain).sum()


def test_mx_scales_are_those_of_the_standard() -> None:
    """OCP MX 1.0, 6.3: the exponent of the largest, less that of the largest element."""
    fmt = Format("e2m1", "ue8m0", "none", 1, 32)
    largest = torch.tensor([4.0, 7.99, 8.0, 2**-130, 0.0, 1.5])
    q = quantize(largest[:, None].expand(6, 32), fmt)
    assert q.scale is not None
    assert q.scale.flatten().tolist() == [127, 127, 128, 0, 0, 125]
    assert q.dequantize()[1, 0] == 6, "beyond the largest element"


def test_ties_go_to_even_codes() -> None:
    fmt = Format("e2m1", "ue8m0", "none", 1, 32)
    row = torch.zeros(1, 32)
    row[0, :9] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75, -5.0])
    row[0, 31] = 4.0  # the scale is one
    expected = [0, 1, 1, 2, 2, 4, 4, -1, -4]
    assert quantize(row, fmt).dequantize()[0, :9].tolist() == expected


@pytest.mark.parametrize("size", [2.0**-149, 2.0**-130, 3e38])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_extreme_sizes_stay_finite(fmt: Format, size: float) -> None:
    q = quantize(torch.tensor([[size, -size, 0.0, size]]), fmt)
    assert torch.isfinite(q.dequantize(torch.float64)).all()


def test_blocks_of_ggml_have_the_values_of_the_gguf_package() -> None:
    floats = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(floats, gguf.GGMLQuantizationType.Q8_0)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    matrix = Quantized(Format("q8_0"), torch.from_numpy(blocks))
    np.testing.assert_array_equal(decoded(matrix), expected)
    scaled = dataclasses.replace(matrix, scale=torch.tensor([0.3])).dequantize()
    np.testing.assert_array_equal(scaled.numpy(), expected * np.float32(0.3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "fmt", ["e5m2-ue8m0-g32", "e5m2-f32-128x128", "e4m3-f32-1x0", "e2m1-e4m3-g16", "i8-f32-1x0"]
)
def test_values_are_rounded_once(fmt: str, dtype: torch.dtype) -> None:
    """Scales of small weights are outside of f16, and their products are not."""
    made = quantize(torch.randn(128, 256) * 0.001, fmt)
    assert torch.equal(made.dequantize(dtype), made.dequantize().to(dtype))


@pytest.mark.parametrize("element", ["f32", "bf16", "q8_0"])
def test_a_factor_is_that_of_any_matrix(element: str) -> None:
    weight = torch.randn(4, 64)
    data: Any = weight if element == "f32" else weight.bfloat16()
    if element == "q8_0":
        data = torch.from_numpy(gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))
    plain = Matrix(Format(element), data)
    twice = dataclasses.replace(plain, factor=torch.tensor(2.0))
    assert torch.equal(dequantize(twice), 2 * dequantize(plain))


def test_blocks_that_the_gguf_package_cannot_decode_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has the type Q8_1, which gguf .* cannot decode"):
        Quantized(Format("ggml:9"), torch.zeros(2, 40, dtype=torch.uint8)).dequantize()


def test_nan_codes_come_back_as_nan() -> None:
    scale = torch.tensor([[255], [127]], dtype=torch.uint8)
    data = torch.full((2, 4), 0x38, dtype=torch.uint8)
    data[1, 2] = 0x7F
    values = Quantized(Format("e4m3", "ue8m0", "none", 1, 32), data, scale).dequantize()
    assert values[0].isnan().all()
    assert values[1].isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("weight", "fmt", "message"),
    [
        (torch.ones(3), Format("bf16"), r"a matrix \[n, k\] or a stack .*, got shape \[3\]"),
        (torch.full((2, 2), torch.nan), Format("bf16"), "not finite"),
        (torch.ones(2, 3), Format("u4", "f32", "none", 1, 32), "depth 3 does not fill whole bytes"),
        (torch.ones(2, 4), Format("e4m3"), "cannot quantise to e4m3"),
        (
            torch.ones(2, 4),
            Format("u4", "ue8m0", "none", 1, 32),
            "cannot quantise to u4 with ue8m0",
        ),
        (torch.full((2, 4), 1e6), Format("f16"), "not finite in torch.float16"),
        (
            torch.full((2, 4), 1e39, dtype=torch.float64),
            Format("bf16"),
            "not finite in torch.bfloat16",
        ),
        (torch.full((2, 4), 1e300, dtype=torch.float64), FORMATS[0], "not finite in torch.float32"),
        (torch.ones(2, 4), Format("u8", "f32", "none", 1, 0), "cannot quantise to u8"),
        (torch.ones(2, 4), Format("i8", "f32", "u8", 1, 0), "cannot quantise to i8"),
        (torch.ones(2, 4), Format("i4", "f32", "u8", 1, 32), "cannot quantise to i4"),
        (torch.ones(2, 4), Format("u8", "f32", "i8", 1, 0), "cannot quantise to u8"),
    ],
)
def test_what_cannot_be_quantized_is_said(weight: torch.Tensor, fmt: Format, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize(weight, fmt)


def test_stacks_and_arrays_that_go_backwards() -> None:
    stack = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    made = quantize(stack, FORMATS[0])
    assert torch.equal(dequantize(made), made.dequantize())
    backwards = stack[0].numpy()[::-1, ::-1]
    again = quantize(backwards, FORMATS[0])
    assert torch.equal(again.data, quantize(torch.from_numpy(backwards.copy()), FORMATS[0]).data)


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one)), saved_and_loaded],
    ids=["copy", "deepcopy", "pickle", "torch.save"],
)
def test_formats_and_results_are_copied_and_pickled(again: Callable[[Any], Any]) -> None:
    for fmt in (*FORMATS, Format("u4", "f16", "u8", 1, 128), Format("q4_k"), Format("ggml:9999")):
        assert again(fmt) == fmt
    made = quantize(torch.randn(64, 64), "e2m1-e4m3-g16")
    found = again(made)
    assert found.format == made.format
    for name in ("data", "scale", "factor"):
        assert torch.equal(getattr(found, name), getattr(made, name))
    assert torch.equal(found.dequantize(), made.dequantize())


def test_a_result_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantize(torch.ones(2, 2), Format("bf16")).scale = None  # type: ignore[misc]
