"""The software AMX core against numpy, and against the CPU where it has AMX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import amx_tools
import numpy as np
import pytest
from amx_tools import Soft, assemble, config

# rax: configuration, rcx: C, rdx: A, rsi: B, rdi: stride of C, r8: stride of A and B.
CFG, C, A, B, C_STRIDE, AB_STRIDE = 0, 1, 2, 6, 7, 8

INT8 = {
    "tdpbssd": (np.int8, np.int8),
    "tdpbsud": (np.int8, np.uint8),
    "tdpbusd": (np.uint8, np.int8),
    "tdpbuud": (np.uint8, np.uint8),
}
#: Executes a program: (code, registers).
Run = Callable[[bytes, list[int]], Any]
#: Configuration, C, A and B.
Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
SHAPES = [(16, 16, 16), (1, 1, 1), (5, 7, 3), (16, 3, 9), (2, 16, 16)]  # m, n, k in words


def product(
    op: str, cfg: np.ndarray, c: np.ndarray, a: np.ndarray, b: np.ndarray
) -> tuple[bytes, list[int]]:
    """A program that does c += a x b in place, and the registers it wants."""
    code = (
        assemble("ldtilecfg", base=CFG)
        + assemble("tileloadd", 0, base=C, index=C_STRIDE)
        + assemble("tileloadd", 1, base=A, index=AB_STRIDE)
        + assemble("tileloaddt1", 2, base=B, index=AB_STRIDE)
        + assemble(op, 0, 1, 2)
        + assemble("tilestored", 0, base=C, index=C_STRIDE)
    )
    registers = [0] * 16
    for number, array in ((CFG, cfg), (C, c), (A, a), (B, b)):
        registers[number] = array.ctypes.data
    registers[C_STRIDE], registers[AB_STRIDE] = c.strides[0], 64
    return code, registers


def operands(m: int, n: int, k: int, seed: int) -> Operands:
    """Configuration, C of 4-byte columns, and A and B as 64-byte rows."""
    rng = np.random.default_rng(seed)
    cfg = config({0: (m, 4 * n), 1: (m, 4 * k), 2: (k, 4 * n)})
    c = rng.integers(-(2**31), 2**31, (m, n), np.int64).astype(np.int32)
    a = rng.integers(0, 256, (16, 64)).astype(np.uint8)
    b = rng.integers(0, 256, (16, 64)).astype(np.uint8)
    return cfg, c, a, b


def bf16_operands(m: int, n: int, k: int, seed: int) -> Operands:
    """The same with values of widely different sizes, so that every rounding shows."""
    rng = np.random.default_rng(seed)
    cfg, _, a, b = operands(m, n, k, seed)

    def values(shape: tuple[int, int]) -> np.ndarray:
        x: np.ndarray = rng.standard_normal(shape) * 2.0 ** rng.integers(-70, 60, shape)
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    a[:] = values((16, 32)).view(np.uint8)
    b[:] = values((16, 32)).view(np.uint8)
    return cfg, rng.standard_normal((m, n)).astype(np.float32), a, b


def as_float(bf16_rows: np.ndarray) -> np.ndarray:
    return (bf16_rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.fixture(params=["software", "hardware"])
def run(request: pytest.FixtureRequest, soft: Soft) -> Run:
    """Executes a program: (code, registers)."""
    if request.param == "software":
        return soft.run
    if not amx_tools.can_run_amx():
        pytest.skip("this CPU or kernel offers no AMX")
    return amx_tools.run_native


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", INT8)
def test_int8_products_are_exact(op: str, shape: tuple[int, int, int], run: Run) -> None:
    m, n, k = shape
    cfg, c, a, b = operands(m, n, k, seed=1)
    a_type, b_type = INT8[op]
    expected = amx_tools.model_int8(c, a[:m, : 4 * k].view(a_type), b[:k, : 4 * n].view(b_type))
    run(*product(op, cfg, c, a, b))
    np.testing.assert_array_equal(c, expected)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bf16_products_have_the_bits_of_the_model(
    shape: tuple[int, int, int], seed: int, run: Run
) -> None:
    m, n, k = shape
    cfg, c, a, b = bf16_operands(m, n, k, seed)
    expected = amx_tools.model_bf16(c, as_float(a)[:m, : 2 * k], as_float(b)[:k, : 2 * n])
    run(*product("tdpbf16ps", cfg, c, a, b))
    np.testing.assert_array_equal(c.view(np.uint32), expected.view(np.uint32))


def test_subnormals_are_zero_to_bf16_products(run: Run) -> None:
    cfg, c, a, b = bf16_operands(1, 1, 1, seed=0)
    c[:] = 2.0**-140
    a.view(np.uint16)[0, :2] = 0x0001, 0x3F80  # smallest subnormal, one
    b.view(np.uint16)[0, :2] = 0x7F00, 0x0001
    run(*product("tdpbf16ps", cfg, c, a, b))
    assert c[0, 0] == 0


def test_infinity_and_nan_stay_in_their_row(run: Run) -> None:
    cfg, c, a, b = bf16_operands(4, 16, 16, seed=3)
    a.view(np.uint16)[1, 3] = 0x7F80
    a.view(np.uint16)[2, 5] = 0x7FC0
    expected = amx_tools.model_bf16(c, as_float(a)[:4], as_float(b))
    run(*product("tdpbf16ps", cfg, c, a, b))
    assert np.isnan(c[2]).all()
    np.testing.assert_array_equal(np.isfinite(c), np.isfinite(expected))
    np.testing.assert_array_equal(c[[0, 3]], expected[[0, 3]])


def test_a_smaller_row_leaves_the_rest_of_the_tile_zero(run: Run) -> None:
    """tileloadd of 2 rows into a tile that held 16 clears the other 14 and the tail of each row."""
    cfg = config({0: (16, 64)})
    small = config({0: (2, 8)})
    full = np.full((16, 64), 7, np.uint8)
    out = np.full((16, 64), 9, np.uint8)
    registers = [0] * 16
    registers[CFG], registers[A], registers[AB_STRIDE] = cfg.ctypes.data, full.ctypes.data, 64
    registers[C], registers[B] = out.ctypes.data, small.ctypes.data
    code = (
        assemble("ldtilecfg", base=CFG)
        + assemble("tileloadd", 0, base=A, index=AB_STRIDE)
        + assemble("ldtilecfg", base=B)
        + assemble("tileloadd", 0, base=A, index=AB_STRIDE)
        + assemble("tilestored", 0, base=C, index=AB_STRIDE)
    )
    run(code, registers)
    expected = np.full((16, 64), 9, np.uint8)
    expected[:2, :8] = 7
    np.testing.assert_array_equal(out, expected)


def test_configuration_comes_back_from_sttilecfg(run: Run) -> None:
    cfg = config({0: (16, 64), 3: (1, 4), 7: (5, 28)})
    out = np.full(64, 255, np.uint8)
    registers = [0] * 16
    registers[CFG], registers[C] = cfg.ctypes.data, out.ctypes.data
    run(assemble("ldtilecfg", base=CFG) + assemble("sttilecfg", base=C), registers)
    np.testing.assert_array_equal(out, cfg)


@pytest.mark.parametrize("tile", [0, 7])
@pytest.mark.parametrize("displacement", [0, 64, -64, 4096])
@pytest.mark.parametrize(("base", "index", "scale"), [(1, 2, 1), (9, 8, 2), (2, 9, 8), (11, 0, 4)])
def test_memory_forms(
    base: int, index: int, scale: int, displacement: int, tile: int, run: Run
) -> None:
    """Every register pair, scale and displacement finds the same rows."""
    memory = np.arange(16 * 1024, dtype=np.int32).reshape(-1, 16)
    out = np.zeros((3, 16), np.int32)
    cfg = config({tile: (3, 64)})
    middle = 100
    registers = [0] * 16
    registers[6], registers[7], registers[10] = cfg.ctypes.data, 64, out.ctypes.data
    registers[base] = memory[middle].ctypes.data - displacement
    registers[index] = 128 // scale
    load = assemble(
        "tileloadd", tile, base=base, index=index, scale=scale, displacement=displacement
    )
    code = assemble("ldtilecfg", base=6) + load + assemble("tilestored", tile, base=10, index=7)
    run(code, registers)
    np.testing.assert_array_equal(out, memory[middle : middle + 5 : 2])


@pytest.mark.parametrize(
    ("cfg", "op", "reason"),
    [
        ({0: (2, 8), 1: (2, 8), 2: (2, 8)}, ("tdpbssd", 0, 1, 1), "used twice"),
        ({0: (2, 8), 1: (3, 8), 2: (2, 8)}, ("tdpbssd", 0, 1, 2), "do not fit"),
        ({0: (2, 8), 1: (2, 8)}, ("tdpbssd", 0, 1, 2), "not part of the configuration"),
        ({0: (2, 6)}, ("tilezero", 0), "multiple of 4"),
        ({0: (2, 80)}, ("tilezero", 0), "too large"),
        ({0: (2, 0)}, ("tilezero", 0), "not both"),
    ],
)
def test_what_hardware_refuses_is_refused(
    cfg: dict[int, tuple[int, int]], op: tuple[Any, ...], reason: str, soft: Soft
) -> None:
    memory = config(cfg)
    registers = [0] * 16
    registers[CFG] = memory.ctypes.data
    fault = soft.run(assemble("ldtilecfg", base=CFG) + assemble(*op), registers)
    assert fault is not None
    assert reason in fault


def test_tiles_need_a_configuration(soft: Soft) -> None:
    fault = soft.run(assemble("tilezero", 0), [0] * 16)
    assert fault is not None
    assert "no tile configuration" in fault


@pytest.mark.parametrize(
    "code",
    [
        "c5f877",  # vzeroupper
        "c4e279504800",  # vpdpbusd xmm
        "c4e27b4bc0",  # tileloadd with a register operand
        "c4e27b4b00",  # tileloadd without a SIB byte
        "c4e2fb49c0",  # tilezero with VEX.W
        "c4e27f49c0",  # tilezero with VEX.L
    ],
)
def test_other_instructions_are_left_alone(code: str, soft: Soft) -> None:
    assert soft.decode(bytes.fromhex(code), [0] * 16) is None
