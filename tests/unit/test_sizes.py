"""Sizes that cannot be are refused with a sentence, not with a signal."""

from __future__ import annotations

import numpy as np
import pytest

import ktk
from ktk import _core

HUGE = 1 << 24


def zeros(rows: int, columns: int) -> np.ndarray:
    """A matrix with any number of rows in the memory of one."""
    return np.broadcast_to(np.zeros(columns, np.float16), (rows, columns))


@pytest.mark.slow
def test_a_layer_larger_than_the_address_space_is_refused() -> None:
    moe = ktk.load_backend("BF16").moe(
        num_experts=HUGE, num_experts_per_tok=1, hidden_size=HUGE, intermediate_size=HUGE
    )
    matrix = zeros(HUGE, HUGE)
    with pytest.raises(ValueError, match=r"in bf16, which is more than the 2\^47 bytes"):
        moe.load_expert(0, matrix, matrix, matrix)
    assert moe.nbytes == 0


def test_a_layer_larger_than_the_memory_is_refused() -> None:
    moe = ktk.load_backend("BF16").moe(
        num_experts=1 << 10, num_experts_per_tok=1, hidden_size=1 << 17, intermediate_size=1 << 17
    )
    matrix = zeros(1 << 17, 1 << 17)
    with pytest.raises(MemoryError, match=r"the system refuses \d+ bytes of memory; ulimit -v, vm"):
        moe.load_expert(0, matrix, matrix, matrix)


def test_a_matrix_larger_than_any_is_refused() -> None:
    with pytest.raises(ValueError, match="between 1 and 16777216 rows and columns, got"):
        _core.PackedMatrix(ktk.load_backend("BF16").core, "avx2", zeros(1 << 40, 64))


def test_a_micro_kernel_is_not_run_with_more_rows_than_it_takes() -> None:
    backend = ktk.load_backend("AMXINT4")
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((32, 128), np.float32)
    matrix = _core.PackedMatrix(backend.core, "avx2", weight)
    variant = next(v for v in backend.variants if v.name == matrix.variant)
    index, (name, m_max) = next(
        (i, kernel) for i, kernel in enumerate(variant.ukernels) if kernel[1] < 1000
    )
    x = rng.standard_normal((m_max + 1, 128), np.float32)
    assert matrix.matmul(x[:m_max], ukernel=index).shape == (m_max, 32)
    with pytest.raises(ValueError, match=f"{name} takes at most {m_max} rows, got {m_max + 1}"):
        matrix.matmul(x, ukernel=index)
    with pytest.raises(IndexError, match="micro-kernels, none has the number 99"):
        matrix.matmul(x, ukernel=99)


@pytest.mark.parametrize("name", ["AMXINT4", "BF16", "LLAMAFILE"])
@pytest.mark.parametrize("extents", [(0, 64), (64, 0), (HUGE + 1, 64), (64, HUGE + 1)])
def test_extents_that_are_none_are_refused(name: str, extents: tuple[int, int]) -> None:
    backend = ktk.load_backend(name)
    for stored in backend.formats:
        with pytest.raises(ValueError, match="between 1 and 16777216 rows and columns"):
            backend.core.packed_size(stored, *extents)
        with pytest.raises(ValueError, match="between 1 and 16777216 rows and columns"):
            backend.variants[0].act_of(stored, *extents)


@pytest.mark.parametrize("name", ["AMXINT4", "BF16", "LLAMAFILE"])
@pytest.mark.parametrize("element", ["i8", "ggml:4", "ggml:63", "ggml:999"])
def test_formats_that_a_backend_does_not_store_are_refused(name: str, element: str) -> None:
    backend = ktk.load_backend(name)
    stored = ktk.Format(element)
    with pytest.raises(ValueError, match=f"{name} does not store weights as"):
        backend.variants[0].act_of(stored, 64, 256)
    with pytest.raises(ValueError, match=f"{name} does not store weights as"):
        backend.core.packed_size(stored, 64, 256)
