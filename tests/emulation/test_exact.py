"""The AMX variants compute exactly what a model in numpy says.

Runs where AMX can be executed: on a CPU that has it, and under run_emulated.py.
"""

from __future__ import annotations

from typing import Any

import amx_tools
import numpy as np
import pytest
import torch

import ktk
from ktk import _core, ik_types
from ktk.ggml import block, decoded
from ktk.testing import formats

pytestmark = pytest.mark.skipif(
    not amx_tools.trapped and "amx_tile" not in amx_tools.cpu_flags(),
    reason="no AMX here; test_trap.py runs these in software",
)
SHAPES = [(1, 32, 128), (16, 64, 256), (5, 33, 130), (37, 70, 300)]
POOL_THREADS = 2


def find(name: str, variant: str) -> tuple[ktk.Backend, _core.VariantInfo]:
    backend = ktk.load_backend(name)
    found = next(v for v in backend.variants if v.name == variant)
    assert found.runnable, f"{variant} lacks {found.missing_isa}"
    return backend, found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_products_are_exact(shape: tuple[int, int, int]) -> None:
    """With scales of one, every sum is an integer that float32 holds."""
    m, n, k = shape
    backend, variant = find("AMXINT8", "amx_int8")
    rng = np.random.default_rng(7)
    weight = rng.integers(-127, 128, (n, k)).astype(np.int8)
    act = rng.integers(-126, 127, (m, k)).astype(np.float32)
    act[:, :: variant.act.group_k or k] = 127  # each group's scale becomes one
    matrix = _core.PackedMatrix(backend.core, "amx_int8", weight, scale=np.ones((n, 1), np.float32))
    np.testing.assert_array_equal(matrix.act_round_trip(act), act)
    expected = act.astype(np.int64) @ weight.astype(np.int64).T
    assert np.abs(expected).max() < 2**24
    for number, (_, m_max) in enumerate(variant.ukernels):
        rows = min(m, m_max)
        np.testing.assert_array_equal(matrix.matmul(act[:rows], ukernel=number), expected[:rows])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("name", "zeros"), [("RAWINT4", False), ("AMXINT4", False), ("AMXINT4", True)]
)
def test_int4_products_are_exact(
    name: str, zeros: bool, group: int, shape: tuple[int, int, int]
) -> None:
    """With scales of one, every sum is an integer that float32 holds."""
    m, n, k = shape
    backend, variant = find(name, "amx_int8")
    rng = np.random.default_rng(10)
    codes = rng.integers(0, 16, (n, k))
    groups = -(-k // group)
    zero = rng.integers(0, 17, (n, groups)).astype(np.uint8) if zeros else None
    given = _core.Format("u4", "bf16", "u8" if zeros else "none", 1, group)
    act = rng.integers(-126, 127, (m, k)).astype(np.float32)
    act[:, :: variant.act.group_k] = 127  # each group's scale becomes one
    data = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    scale = torch.ones(n, groups, dtype=torch.bfloat16)
    matrix = _core.PackedMatrix(
        backend.core, "amx_int8", data, scale=scale, zero=zero, given=given, stored=given
    )
    np.testing.assert_array_equal(matrix.act_round_trip(act), act)
    offset = 8 if zero is None else zero.astype(np.int64).repeat(group, axis=1)[:, :k]
    expected = act.astype(np.int64) @ (codes - offset).T
    for number, (_, m_max) in enumerate(variant.ukernels):
        rows = min(m, m_max)
        np.testing.assert_array_equal(matrix.matmul(act[:rows], ukernel=number), expected[:rows])


def to_bf16(x: np.ndarray) -> np.ndarray:
    return torch.from_numpy(x).to(torch.bfloat16).float().numpy()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_products_have_the_bits_of_the_model(shape: tuple[int, int, int]) -> None:
    """Depth goes through the tiles 32 at a time, each step added to the sum so far."""
    m, n, k = shape
    backend, variant = find("BF16", "amx_bf16")
    rng = np.random.default_rng(8)
    size = 2.0 ** rng.integers(-20, 20, (n, k))
    weight = to_bf16((rng.standard_normal((n, k)) * size).astype(np.float32))
    act = rng.standard_normal((m, k)).astype(np.float32)
    matrix = _core.PackedMatrix(backend.core, "amx_bf16", torch.from_numpy(weight).bfloat16())

    padded = -(-k // 32) * 32
    a = np.pad(to_bf16(act), ((0, 0), (0, padded - k)))
    w = np.pad(weight, ((0, 0), (0, padded - k)))
    expected = np.zeros((m, n), np.float32)
    for begin in range(0, padded, 32):
        block = w[:, begin : begin + 32].reshape(n, 16, 2).transpose(1, 0, 2).reshape(16, 2 * n)
        expected = amx_tools.model_bf16(expected, a[:, begin : begin + 32], block)
    for number, (_, m_max) in enumerate(variant.ukernels):
        rows = min(m, m_max)
        result = matrix.matmul(act[:rows], ukernel=number)
        np.testing.assert_array_equal(result.view(np.uint32), (expected[:rows] + 0).view(np.uint32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["few exponents", "any bits"])
def test_bf16_in_12_bits_gives_the_same_bits(kind: str, shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    rng = np.random.default_rng(10)
    bits = rng.integers(0, 1 << 16, (n, k), np.uint16)
    if kind == "few exponents":
        bits = bits & 0x807F | rng.integers(110, 127, (n, k), np.uint16) << 7
    weight = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    act = rng.standard_normal((m, k)).astype(np.float32)
    results = []
    for name in ("BF16", "BF16Z"):
        backend, _ = find(name, "amx_bf16")
        results.append(_core.PackedMatrix(backend.core, "amx_bf16", weight).matmul(act))
    one, other = (result.view(np.uint32) for result in results)
    np.testing.assert_array_equal(one, other)


def integer_codes(element: str, values: np.ndarray) -> np.ndarray:
    """The codes of small integers in a floating-point type of at most eight bits."""
    table = formats.element_table(element)
    codes = {value: code for code, value in reversed(list(enumerate(table.tolist())))}
    found: np.ndarray = np.vectorize(codes.__getitem__, otypes=[np.uint8])(values)
    return found if element == "e4m3" else found[:, ::2] | found[:, 1::2] << 4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "number"), [("FP8", 0), ("FP8", 1), ("FP8", 2), ("MXFP4", 0), ("MXFP4", 1)]
)
def test_scaled_products_are_exact(name: str, number: int, shape: tuple[int, int, int]) -> None:
    """Powers of two times small integers: every sum is a number that float32 holds."""
    m, n, k = shape
    backend, variant = find(name, "amx_bf16")
    fmt = backend.formats[number]
    rng = np.random.default_rng(9)
    integers = rng.choice([-6.0, -4, -3, -2, -1, 0, 1, 2, 3, 4, 6], (n, k))
    groups = (-(-n // (fmt.group_n or n)), -(-k // (fmt.group_k or k)))
    exponents = rng.integers(-3, 4, groups)
    bias = {"ue8m0": 127, "e4m3": 7}.get(fmt.scale)
    scale = np.exp2(exponents, dtype=np.float32)
    if bias is not None:
        scale = (exponents + bias << (3 if fmt.scale == "e4m3" else 0)).astype(np.uint8)
    data = integer_codes(fmt.element, integers)
    matrix = _core.PackedMatrix(backend.core, "amx_bf16", data, scale=scale, given=fmt, stored=fmt)
    spread = np.exp2(exponents.astype(np.float64)).repeat(fmt.group_n or n, axis=0)[:n]
    weight = integers * spread.repeat(fmt.group_k or k, axis=1)[:, :k]
    np.testing.assert_array_equal(matrix.unpack(), weight)
    act = rng.integers(-8, 9, (m, k)).astype(np.float32)
    for ukernel, (_, m_max) in enumerate(variant.ukernels):
        rows = min(m, m_max)
        expected = act[:rows].astype(np.float64) @ weight.T
        np.testing.assert_array_equal(matrix.matmul(act[:rows], ukernel=ukernel), expected)


@pytest.mark.parametrize(
    "powers",
    [
        *((-4, 4, -2, 2), (-20, 20, -4, 4), (-4, 4, -50, 50)),
        *((-126, 4, -127, 4), (-60, 4, -127, 127)),
        *((-126, -118, 30, 50), (-4, 4, -120, -114), (90, 110, -127, -125)),  # one far off
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "number"), [("FP8", 0), ("FP8", 1), ("FP8", 2), ("MXFP4", 0), ("MXFP4", 1)]
)
def test_scaled_products_of_few_rows_have_the_bits_of_tiles(
    name: str, number: int, powers: tuple[int, int, int, int]
) -> None:
    """Also where something is subnormal or overflows: powers of two of act, and of scales."""
    m, n, k = 2, 33, 200
    backend, variant = find(name, "amx_bf16")
    fmt = backend.formats[number]
    rng = np.random.default_rng(12)
    codes = rng.integers(0, 256, (n, k if fmt.element == "e4m3" else k // 2), dtype=np.uint8)
    if fmt.element == "e4m3":
        codes[codes & 127 == 127] = 0  # NaN
    groups = (-(-n // (fmt.group_n or n)), -(-k // (fmt.group_k or k)))
    exponents = rng.integers(powers[2], powers[3] + 1, groups)
    scale: Any = np.exp2(exponents.clip(-126, 127), dtype=np.float32)
    if fmt.scale == "ue8m0":
        scale = (exponents + 127).astype(np.uint8)
    elif fmt.scale == "e4m3":
        scale = rng.integers(0, 127, groups, dtype=np.uint8)
    sizes = np.exp2(rng.integers(powers[0], powers[1], (m, k)).astype(np.float32))
    act = (rng.standard_normal((m, k)) * sizes * (rng.random((m, k)) > 0.1)).astype(np.float32)
    matrix = _core.PackedMatrix(backend.core, "amx_bf16", codes, scale=scale, given=fmt, stored=fmt)
    last = len(variant.ukernels) - 1
    expected = matrix.matmul(act, ukernel=last)
    assert np.isfinite(expected).any() or powers[3] == 127
    for ukernel in range(last):
        result = matrix.matmul(act, ukernel=ukernel)
        np.testing.assert_array_equal(result, expected)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(expected))


def random_blocks(name: str, shape: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """Rows of blocks of any bits that make finite numbers."""
    columns, size = block(name)
    blocks: np.ndarray = rng.integers(0, 256, (500, size), dtype=np.uint8)
    blocks = blocks[np.isfinite(decoded(blocks, name)).all(axis=1)]
    picked = rng.integers(0, len(blocks), (shape[0], shape[1] // columns))
    return blocks[picked].reshape(shape[0], -1)


BLOCK_TYPES = (
    *("q4_k", "q5_k", "q6_k", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "iq4_xs"),
    *("mxfp4", "nvfp4", "q2_k", "q3_k", "tq1_0", "tq2_0", "iq1_s", "iq1_m"),
    *("iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s"),
    *ik_types.TYPES,
)


@pytest.mark.parametrize(("m", "n"), [(5, 33), (69, 32)])
@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_ggml_products_have_the_bits_of_vnni(name: str, m: int, n: int) -> None:
    """The sums of a group are exact, and what follows is rounded in the same order."""
    backend, variant = find("LLAMAFILE", "amx_int8")
    fmt = _core.Format(name)
    k = 5 * 256 + fmt.group_k  # more than two stretches of two runs, and not whole runs
    rng = np.random.default_rng(11)
    rows = random_blocks(name, (n, k), rng)
    act = rng.standard_normal((m, k)).astype(np.float32)
    matrix = _core.PackedMatrix(backend.core, "amx_int8", rows, given=fmt, stored=fmt)
    vnni = _core.PackedMatrix(backend.core, "avx512_vnni", rows, given=fmt, stored=fmt)
    expected = vnni.matmul(act)
    assert np.isfinite(expected).any()  # exponents of mxfp4 reach beyond f32
    for ukernel, (_, m_max) in enumerate(variant.ukernels):
        most = min(m, m_max)
        result = matrix.matmul(act[:most], ukernel=ukernel)
        np.testing.assert_array_equal(result, expected[:most])


@pytest.mark.parametrize(
    ("name", "variant", "other"),
    [
        ("BF16", "amx_bf16", "avx512"),
        ("AMXINT8", "amx_int8", "avx512_vnni"),
        ("AMXINT4", "amx_int8", "avx512"),
    ],
)
def test_a_layer_equals_the_other_variants(name: str, variant: str, other: str) -> None:
    """A layer on two threads; AMX and AVX-512 read the same weights."""
    backend, _ = find(name, variant)
    config: dict[str, Any] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "hidden_size": 256,
        "intermediate_size": 128,
    }
    rng = np.random.default_rng(9)
    gate, up = (rng.standard_normal((4, 128, 256)).astype(np.float32) / 16 for _ in range(2))
    down = rng.standard_normal((4, 256, 128)).astype(np.float32) / 16
    hidden = rng.standard_normal((40, 256)).astype(np.float32)
    ids = rng.integers(0, 4, (40, 2))
    weights = rng.random((40, 2)).astype(np.float32)
    pool = ktk.WorkerPool(POOL_THREADS, pin=False)
    results = {}
    for chosen in (variant, other):
        moe = backend.moe(**config, variant=chosen, pool=pool)
        moe.load(gate, up, down)
        assert moe.variant == chosen
        results[chosen] = moe(hidden, ids, weights)
    if name == "BF16":
        # Rounds x, for gate and for up, and h to bf16, which avx512 keeps in f32; silu has slopes
        # below 1.1.
        error = np.linalg.norm(results[variant] - results[other])
        assert error < 3.2 * 2**-9 * np.linalg.norm(results[other])
    else:
        np.testing.assert_array_equal(results[variant], results[other])
