"""However many sums a CPU wants in flight, rows have the same bits (`accumulators`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.quantize import quantize

ROWS = (1, 4, 6, 7, 8, 9, 10, 13, 14, 19, 31)


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    yield
    _core.set_prefetch("")


@pytest.mark.parametrize("name", ["BF16", "BF16Z", "FP8"])
def test_results_do_not_depend_on_the_tiles_that_rows_are_dealt_out_to(name: str) -> None:
    backend = ktk.load_backend(name)
    generator = torch.Generator().manual_seed(0)
    weight = quantize(torch.randn(96, 384, generator=generator), backend.formats[0])
    x = torch.randn(max(ROWS), 384, generator=generator)
    for variant in (variant.name for variant in backend.variants if variant.runnable):
        matrix = _core.PackedMatrix(
            backend.core,
            variant,
            weight.data,
            weight.scale,
            given=backend.formats[0],
            stored=backend.formats[0],
        )
        every_row = np.concatenate([matrix.matmul(x[i : i + 1]) for i in range(max(ROWS))])
        # 12: all tiles but the last have 6 rows. 13 and more: no tile has so many, rows are dealt
        # out evenly.
        for accumulators in (0, 1, 8, 10, 11, 12, 13, 4294967295):
            _core.set_prefetch(f"accumulators={accumulators}")
            for rows in ROWS:
                case = f"{variant}, {rows} rows, accumulators={accumulators}"
                assert np.array_equal(matrix.matmul(x[:rows]), every_row[:rows]), case
