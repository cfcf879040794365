"""What LLAMAFILE unpacks is, bit by bit, what decoders of gguf and ktk make of the same blocks."""

from __future__ import annotations

import numpy as np
import pytest

import ktk
from ktk import Format, _core, ik_types
from ktk.ggml import block, decoded

TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4", "NVFP4"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "TQ1_0", "TQ2_0"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
    *("F32", "F16", "BF16"),
    *(name.upper() for name in ik_types.TYPES),
)
if not ktk.backends()["LLAMAFILE"].built:
    pytest.skip("LLAMAFILE is not part of this build", allow_module_level=True)
CORE = ktk.load_backend("LLAMAFILE").core
VARIANTS = [variant.name for variant in ktk.load_backend("LLAMAFILE").variants if variant.runnable]


def random_rows(name: str, n: int, k: int) -> np.ndarray:
    """Rows of any bits at all: every code, and scales that are subnormal, infinite or NaN."""
    columns, size = block(name.lower())
    rng = np.random.default_rng(n + k)
    rows = rng.integers(0, 256, (n, k // columns * size), dtype=np.uint8)
    plain = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}.get(name)
    return rows if plain is None else rows.view(plain)


def decode(rows: np.ndarray, name: str) -> np.ndarray:
    return decoded(rows.view(np.uint8), name.lower())


def pack(variant: str, rows: np.ndarray, name: str, guard: str = "") -> _core.PackedMatrix:
    return _core.PackedMatrix(CORE, variant, rows, given=Format(name.lower()), guard=guard)


def check_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """NaN has many forms, and a sum of two may have either sign."""
    same = actual.view(np.uint32) == expected.view(np.uint32)
    same |= np.isnan(actual) & np.isnan(expected)
    places = np.argwhere(~same)
    assert not places.size, (
        f"{len(places)} of {same.size} differ; the first, at {places[0]}: "
        f"{actual[tuple(places[0])]} for {expected[tuple(places[0])]}"
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TYPES)
def test_blocks_keep_their_values(name: str, variant: str) -> None:
    columns = block(name.lower())[0]
    # Runs of 256 columns, whole and begun; rows beyond the last step of columns.
    for n, k in [(37, 2048), (5, 256 + columns if columns > 1 else 259), (1, max(columns, 2))]:
        rows = random_rows(name, n, k)
        check_same_bits(pack(variant, rows, name).unpack(), decode(rows, name))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TYPES)
def test_many_rows_have_the_bits_of_one(name: str, variant: str) -> None:
    """In tiles of every kind, over more runs than a stretch."""
    packed = pack(variant, random_rows(name, 40, 9 * 256), name)
    x = np.random.default_rng(1).standard_normal((69, 9 * 256)).astype(np.float32)
    single = np.concatenate([packed.matmul(row[np.newaxis]) for row in x])
    for m in (2, 7, 13, 29, 61, 69):
        check_same_bits(packed.matmul(x[:m]), single[:m])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
def test_products_meet_every_scale_of_eight_bits(name: str, variant: str) -> None:
    """Column i has the scale of byte i, and is multiplied with 127, whose act scale is 1."""
    columns, size = block(name.lower())
    k = 256
    rows = np.full((256, k // columns, size), 0x22, np.uint8)  # codes of 1
    rows[:, :, : size - columns // 2] = np.arange(256, dtype=np.uint8)[:, np.newaxis, np.newaxis]
    packed = pack(variant, rows.reshape(256, -1), name)
    with np.errstate(over="ignore"):
        expected = decode(rows.reshape(256, -1), name)[:, 0] * np.float32(127)
    # Micro-kernels for one and two rows, for some, and for many.
    for m in (1, 2, 5, 33, 65):
        x = np.zeros((m, k), np.float32)
        x[:, 0] = 127
        check_same_bits(packed.matmul(x), np.tile(expected, (m, 1)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", TYPES)
def test_micro_kernels_need_no_more_scratch_than_they_say(name: str, variant: str) -> None:
    """The kit tries a few types; here is a page that nobody may touch behind each one's scratch."""
    columns = block(name.lower())[0]
    rows = random_rows(name, 37, max(columns, 256))
    plain, guarded = pack(variant, rows, name), pack(variant, rows, name, guard="scratch")
    act = np.ones((41, plain.k), np.float32)
    (found,) = (v for v in CORE.variants if v.name == variant)
    for number, (_, m_max) in enumerate(found.ukernels):
        some = act[:m_max]
        check_same_bits(guarded.matmul(some, 0, 37, number), plain.matmul(some, 0, 37, number))
