"""Weights decoded once for all tiles of rows, or by every tile: bits are the same.

Which of the two is for the table of the CPU to say (`decode_rows` of KTK_PREFETCH).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.quantize import quantize

NEVER, ALWAYS = "decode_rows=0", "decode_rows=1"


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    _core.set_prefetch("")


@pytest.mark.parametrize("name", ["FP8", "MXFP4"])
def test_results_do_not_depend_on_it(name: str) -> None:
    backend = ktk.load_backend(name)
    generator = torch.Generator().manual_seed(0)
    for variant in (variant.name for variant in backend.variants if variant.runnable):
        for fmt in backend.formats:
            # Five groups of 128 and a half.
            weight = quantize(torch.randn(96, 704, generator=generator), fmt)
            matrix = _core.PackedMatrix(
                backend.core, variant, weight.data, weight.scale, given=fmt, stored=fmt
            )
            for rows in (1, 12, 13, 40):
                x = torch.randn(rows, 704, generator=generator)
                results = []
                for setting in (NEVER, ALWAYS):
                    _core.set_prefetch(setting)
                    results.append(matrix.matmul(x))
                case = f"{variant}, {fmt}, {rows} rows"
                assert np.array_equal(results[0], results[1]), case
