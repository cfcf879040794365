"""How often the AMX kernels load tiles, counted where they are done in software.

A core loads two tiles of 16 cache lines in the time of two products at best, from L1: more loads
than products, and the products wait. So the 2 x 2 scheme, four loads for four products, is what a
kernel must reach from 32 rows on, and what it stores or loads of sums comes on top.

Runs under run_emulated.py only; test_trap.py does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import amx_tools
import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.bench.inputs import random_experts
from ktk.bench.records import Subject
from ktk.bench.runner import load_subject, make_layer
from ktk.bench.shapes import Shape
from ktk.bench.weights import choose_format, prepare, recipe
from ktk.quantize import quantize
from ktk.testing.ggml import is_block, random_blocks

pytestmark = pytest.mark.skipif(
    not amx_tools.trapped, reason="test_trap.py runs these in software, where they are counted"
)
N, K = 64, 2048


@dataclass(frozen=True)
class Kernel:
    """A kernel, and how it uses tiles.

    `depth` is what a product adds up, `sums_depth` how much depth passes between two moves of its
    sums: a run that stays in L1, or what has a scale of its own. `moves` is 2 where sums come back
    to the tiles, and 1 where they are only stored. `deviates` where tiles have another depth than
    `enter` gives them, so that each product loads two configurations. Up to `vector_rows` rows are
    multiplied without tiles.
    """

    backend: str
    variant: str
    format: str
    depth: int
    sums_depth: int
    moves: int = 1
    deviates: bool = False
    vector_rows: int = 0

    def rows_of(self, *rows: int) -> list[int]:
        """Those that tiles multiply."""
        return [m for m in rows if m > self.vector_rows]

    def __str__(self) -> str:
        return f"{self.backend}-{self.format}"


# Runs are 16 KiB of weights, as they are multiplied, in 32 columns.
RUN_BF16 = 16384 // (2 * 32)
KERNELS = [
    Kernel("BF16", "amx_bf16", "bf16", 32, RUN_BF16, moves=2),
    Kernel("BF16Z", "amx_bf16", "bf16", 32, RUN_BF16, moves=2),
    Kernel("FP8", "amx_bf16", "f32-128x128", 32, 128, vector_rows=2),
    Kernel("FP8", "amx_bf16", "f32-row", 32, 128, vector_rows=2),
    Kernel("FP8", "amx_bf16", "ue8m0-g32", 32, RUN_BF16, moves=2, vector_rows=2),
    Kernel("MXFP4", "amx_bf16", "ue8m0-g32", 32, RUN_BF16, moves=2, vector_rows=2),
    Kernel("MXFP4", "amx_bf16", "e4m3-g16", 32, RUN_BF16, moves=2, vector_rows=2),
    Kernel("AMXINT8", "amx_int8", "i8", 64, 512, vector_rows=2),  # the group of activations
    Kernel("AMXINT4", "amx_int8", "bf16-g128", 64, 128, vector_rows=12),
    Kernel("AMXINT4", "amx_int8", "bf16-g64", 64, 64, vector_rows=12),
    Kernel("AMXINT4", "amx_int8", "bf16-g32", 32, 32, deviates=True, vector_rows=12),
    Kernel("RAWINT4", "amx_int8", "bf16-g32", 32, 32, vector_rows=24),
    Kernel("LLAMAFILE", "amx_int8", "q4_k", 32, 32, vector_rows=48),
    Kernel("LLAMAFILE", "amx_int8", "q8_0", 32, 32, vector_rows=48),
]


def matrix(kernel: Kernel) -> _core.PackedMatrix:
    backend = ktk.load_backend(kernel.backend)
    rng = np.random.default_rng(3)
    stored = choose_format(backend, kernel.backend, kernel.format)
    if is_block(stored.element):
        blocks = random_blocks(stored.element, (N, K), 1.0, rng)
        return _core.PackedMatrix(backend.core, kernel.variant, blocks, given=stored, stored=stored)
    given = recipe(backend, stored).given
    made = quantize(torch.from_numpy(rng.standard_normal((N, K))).bfloat16(), given)
    parts: dict[str, Any] = {"scale": made.scale, "zero": made.zero}
    return _core.PackedMatrix(
        backend.core,
        kernel.variant,
        made.data,
        given=given,
        stored=stored,
        **{name: part for name, part in parts.items() if part is not None},
    )


@dataclass(frozen=True)
class Counts:
    """What a product of matrices did with tiles."""

    operand_loads: int
    sum_moves: int
    products: int
    configs: int


def count(packed: _core.PackedMatrix, rows: int) -> Counts:
    """Multiply as a layer would. Sums are the tiles that products add to."""
    assert amx_tools.trap is not None
    act = np.random.default_rng(4).standard_normal((rows, K)).astype(np.float32)
    soft = amx_tools.trap
    configs, before = soft.counts()["ldtilecfg"], soft.tile_counts()
    packed.matmul(act)
    loads, stores, products = soft.tile_counts() - before
    is_sum = products > 0
    return Counts(
        operand_loads=int(loads[~is_sum].sum()),
        sum_moves=int(loads[is_sum].sum() + stores[is_sum].sum()),
        products=int(products.sum()),
        configs=soft.counts()["ldtilecfg"] - configs,
    )


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_tiles_are_loaded_no_more_often_than_multiplied(kernel: Kernel) -> None:
    packed = matrix(kernel)
    for rows in kernel.rows_of(32, 48, 64, 80, 100, 128):
        found = count(packed, rows)
        # Tiles of 16 rows: two of them share those of the weights, an odd one has them for itself.
        pairs, odd = divmod(-(-rows // 16), 2)
        blocks = N // 32 * K // kernel.depth
        assert found.products == (4 * pairs + 2 * odd) * blocks, (rows, found)
        assert found.operand_loads <= (4 * pairs + 3 * odd) * blocks, (rows, found)
        runs = -(-K // kernel.sums_depth)
        tiles = (2 * pairs + odd) * N // 16
        assert found.sum_moves <= kernel.moves * tiles * runs, (rows, found)


@pytest.mark.parametrize("kernel", [one for one in KERNELS if one.vector_rows], ids=str)
def test_few_rows_are_multiplied_without_tiles(kernel: Kernel) -> None:
    packed = matrix(kernel)
    assert count(packed, kernel.vector_rows).products == 0
    assert count(packed, kernel.vector_rows + 1).products > 0


def test_types_with_groups_of_16_are_multiplied_without_tiles() -> None:
    assert count(matrix(Kernel("LLAMAFILE", "amx_int8", "q6_k", 16, 16)), 128).products == 0


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_tiles_are_configured_once(kernel: Kernel) -> None:
    """By `enter`. Fewer than 16 rows, and another depth, change it for a call."""
    packed = matrix(kernel)
    for rows in kernel.rows_of(16, 32, 100):
        assert count(packed, rows).configs == (3 if kernel.deviates else 1)
    assert count(packed, max(5, kernel.vector_rows + 1)).configs <= 3


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not kernel.deviates], ids=str)
def test_a_layer_configures_tiles_once_for_each_worker(kernel: Kernel) -> None:
    assert amx_tools.trap is not None
    workers, size = 2, 256
    shape = Shape(
        name="small",
        num_experts=3,
        num_experts_per_tok=2,
        hidden_size=size,
        intermediate_size=size,
    )
    subject = Subject(kernel.backend, kernel.variant, kernel.format)
    experts = prepare(load_subject(subject)[1], random_experts(shape, 3))
    moe = make_layer(subject, shape, experts, ktk.WorkerPool(workers, pin=False))
    tokens = 96  # 64 rows for each expert
    hidden = np.random.default_rng(5).standard_normal((tokens, size)).astype(np.float32)
    ids = np.stack([np.arange(tokens) % 3, (np.arange(tokens) + 1) % 3], axis=1)
    before = amx_tools.trap.counts()
    moe(hidden, ids, np.full((tokens, 2), 0.5, np.float32))
    after = amx_tools.trap.counts()
    assert after["ldtilecfg"] - before["ldtilecfg"] == workers
    assert after["tilerelease"] - before["tilerelease"] == workers
