"""The kit's numpy decoders against the definitions of the formats, and against torch's types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktk import Format
from ktk.testing import formats

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]  # OCP MX 1.0, table 5

SCALED = [
    Format("u4", "bf16", "none", 1, 32),
    Format("u4", "f16", "none", 1, 64),
    Format("u4", "f32", "none", 1, 0),
    Format("u4", "f16", "u8", 1, 128),
    Format("u4", "bf16", "u8", 1, 32),
    Format("u4", "bf16", "bf16", 1, 64),
    Format("i4", "f32", "i8", 1, 32),
    Format("i8", "f32", "none", 1, 0),
    Format("e4m3", "f32", "none", 128, 128),
    Format("e4m3", "bf16", "none", 128, 128),
    Format("e4m3", "f32", "none", 1, 0),
    Format("e4m3", "ue8m0", "none", 1, 32),
    Format("e5m2", "f32", "none", 1, 0),
    Format("e2m1", "ue8m0", "none", 1, 32),
]


@pytest.mark.parametrize(
    ("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)]
)
def test_small_floats_are_those_of_torch(name: str, dtype: torch.dtype) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    np.testing.assert_array_equal(formats.element_table(name), expected)


def test_e2m1_is_the_table_of_its_standard() -> None:
    expected = E2M1 + [-value for value in E2M1]
    np.testing.assert_array_equal(formats.element_table("e2m1"), expected)


def decoded(source: formats.Source) -> np.ndarray:
    """Decode by the letter of abi.h, one weight at a time."""
    fmt, (n, k) = source.format, source.values.shape
    values = np.empty((n, k))
    for row in range(n):
        for column in range(k):
            byte = source.data[row, column // 2 if fmt.element in ("u4", "i4", "e2m1") else column]
            code = int(byte) >> 4 * (column % 2) & 15
            group = row // (fmt.group_n or n), column // (fmt.group_k or k)
            if fmt.element == "u4":
                value = code - (8.0 if source.zero is None else float(source.zero[group]))
            elif fmt.element == "i4":
                value = float((code ^ 8) - 8 - int(source.zero[group]))
            elif fmt.element == "e2m1":
                value = E2M1[code & 7] * (-1 if code & 8 else 1)
            elif fmt.element == "i8":
                value = float(np.int8(byte))
            else:
                kind = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[fmt.element]
                value = float(torch.tensor([int(byte)], dtype=torch.uint8).view(kind).double())
            scale = source.scale[group]
            if fmt.scale == "ue8m0":
                factor = np.nan if scale == 255 else 2.0 ** (int(scale) - 127)
            else:
                factor = float(scale)
            values[row, column] = value * factor
    return values


@pytest.mark.parametrize("fmt", SCALED, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 64), (130, 130), (5, 270)], ids=str)
def test_a_source_holds_the_values_that_it_says(fmt: Format, shape: tuple[int, int]) -> None:
    assert formats.is_known(fmt)
    rng = np.random.default_rng(3)
    values = rng.standard_normal(shape).astype(np.float32)
    source = formats.make_source(fmt, values, rng)
    assert source.scale.shape == formats.group_counts(fmt, *shape)
    np.testing.assert_array_equal(source.values, decoded(source))
    # Weights have about the size that was asked for, so that products of them stay in range.
    assert np.abs(source.values).max() <= 5 * np.abs(values).max()


def test_zero_points_reach_one_beyond_the_codes() -> None:
    """GPTQ's first version stores the zero point minus one: 15 means 16."""
    fmt = Format("u4", "f16", "u8", 1, 32)
    source = formats.make_source(fmt, np.ones((64, 64), np.float32), np.random.default_rng(0))
    assert source.zero.dtype == np.uint8
    assert (source.zero.min(), source.zero.max()) == (0, 16)


@pytest.mark.parametrize("fmt", [*SCALED, Format("bf16"), Format("f16"), Format("f32")], ids=str)
def test_a_nan_is_where_it_was_put(fmt: Format) -> None:
    rng = np.random.default_rng(4)
    clean = formats.make_source(fmt, rng.standard_normal((130, 130)).astype(np.float32), rng)
    for place in formats.nan_places(fmt):
        source = formats.with_nan(clean, place, 129, 7)
        lost = np.isnan(source.values)
        assert lost[129, 7]
        group = fmt.group_n or 130, fmt.group_k or 130
        rows, columns = (1, 1) if place == "data" else group
        assert lost.sum() == min(rows, 130 - 129 // rows * rows) * min(columns, 130)
        np.testing.assert_array_equal(source.values[~lost], clean.values[~lost])
        assert np.isfinite(clean.values).all()
        if fmt.scale != "none":
            np.testing.assert_array_equal(source.values, decoded(source))
    assert formats.nan_places(Format("e2m1", "ue8m0", "none", 1, 32)) == ("scale",)


def rounded(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    rounded: np.ndarray = np.clip(np.rint(values / scale), -8, 7) * scale
    return rounded


@pytest.mark.parametrize("factor", [1.0, 0.8], ids=["largest magnitude", "cut off"])
def test_a_group_may_lose_what_its_largest_magnitude_explains(factor: float) -> None:
    """Rounding to the scale of the largest passes; so does a finer one that cuts a few off."""
    fmt = Format("u4", "f32", "none", 1, 128)
    values = np.random.default_rng(5).standard_normal((64, 128))
    scale = factor * np.abs(values).max(axis=1, keepdims=True) / 7
    stored = rounded(values, scale)
    formats.check_codec(fmt, Format("f32"), stored, values)
    half_a_step = formats.codec_bound(fmt, np.abs(values))
    beyond = np.abs(stored - values) > half_a_step
    assert beyond.any() == (factor < 1), "a bound on single values would refuse the better scale"


@pytest.mark.parametrize("factor", [0.4, 2.5], ids=["far too small", "far too large"])
def test_a_group_may_not_lose_more(factor: float) -> None:
    fmt = Format("u4", "f32", "none", 1, 128)
    values = np.random.default_rng(5).standard_normal((64, 128))
    stored = rounded(values, factor * np.abs(values).max(axis=1, keepdims=True) / 7)
    with pytest.raises(AssertionError, match="norm of a group's error"):
        formats.check_codec(fmt, Format("f32"), stored, values)


def test_the_norm_of_a_group_has_no_limit_of_size() -> None:
    fmt = Format("u4", "f32", "none", 1, 2)
    values = np.array([[3e200, 4e200, 0, 0, 3e-300, 4e-300, np.inf, 1]])
    norm = formats.group_norm(fmt, values)[0, ::2]
    np.testing.assert_allclose(norm[:3], [5e200, 0, 5e-300], rtol=1e-12)
    assert norm[3] == np.inf
