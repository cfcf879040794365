"""What is timed: products whose class is known from the rows of a kernel's tile."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# kLineProducts of the kernels (backends/gemm/driver.h): lines of operands that a line becomes.
LINE_PRODUCTS = {
    ("BF16", "amx_bf16"): 1,
    ("BF16", "avx512_bf16"): 1,
    ("BF16", "avx512"): 2,
    ("BF16", "avx2"): 2,
    ("BF16", "arm_bf16"): 2,
    ("BF16", "neon"): 2,
    ("AMXINT8", "amx_int8"): 1,
    ("AMXINT8", "avx512_vnni"): 1,
}
# Kernels that decode weights ahead of all tiles, whatever the number of these.
DECODING = {("FP8", "amx_bf16"), ("FP8", "avx2")}
# Kernels that do so, or let every tile decode, as the CPU wants (`decode_rows`).
EITHER = {(name, isa) for name in ("MXFP4", "FP8") for isa in ("avx512_bf16", "avx512")}
EITHER |= {("FP8", "avx512_vbmi")}

# Kernels that deal rows out as `accumulators` says, with such numbers of rows.
DEALING = {("BF16", "avx2"): (8, 9, 14), ("FP8", "avx2"): (8, 9, 14)}


class Variant(Protocol):
    """What is needed of `ktk._core.VariantInfo`."""

    @property
    def name(self) -> str: ...
    @property
    def runnable(self) -> bool: ...
    @property
    def ukernels(self) -> Sequence[tuple[str, int]]: ...


@dataclass(frozen=True)
class Case:
    """Calls of one variant in which every expert that is hit gets `rows` rows.

    `kind` is "single" for one tile of rows, which is few or one by its `products`, or the class.
    """

    backend: str
    variant: str
    rows: int
    kind: str
    products: int = 0

    def __str__(self) -> str:
        return f"{self.backend} {self.variant}, {self.rows} rows"


def kernel_for(variant: Variant, rows: int) -> str:
    """Return the name of the micro-kernel that multiplies so many rows."""
    return next(name for name, most in variant.ukernels if rows <= most)


def tile_rows(name: str) -> int | None:
    """Return the 12 of ``gemm_12x32_avx512``; None where a kernel has no such name."""
    found = re.match(r"[a-z]+_(\d+)x\d+", name)
    return int(found[1]) if found else None


def cases_of(backend: str, variant: Variant) -> Iterator[Case]:
    """Yield the products of a variant that tell the classes apart."""
    if (backend, variant.name) in DECODING:
        for rows in (1, 8, 48):
            yield Case(backend, variant.name, rows, "decode")
        return
    products = LINE_PRODUCTS.get((backend, variant.name))
    mr = tile_rows(variant.ukernels[-1][0])
    if products is None or mr is None:
        return
    for rows in sorted({1, 2, 4, 8, mr}):
        # Rows that another micro-kernel multiplies say nothing about this one's tiles.
        if rows <= mr and tile_rows(kernel_for(variant, rows)) == mr:
            yield Case(backend, variant.name, rows, "single", rows * products)
    yield Case(backend, variant.name, 2 * mr, "pair")
    yield Case(backend, variant.name, 4 * mr, "many")


def either_cases(backend: str, variants: Sequence[Variant]) -> Iterator[Case]:
    """Yield products that a backend's default variant can decode in either way."""
    for variant in [variant for variant in variants if variant.runnable][:1]:
        if (backend, variant.name) in EITHER:
            for rows in (6, 13, 24, 48, 96):
                yield Case(backend, variant.name, rows, "either")


def dealing_cases(backend: str, variants: Sequence[Variant]) -> Iterator[Case]:
    """Yield products of a backend's default variant whose tiles depend on `accumulators`."""
    for variant in [variant for variant in variants if variant.runnable][:1]:
        for rows in DEALING.get((backend, variant.name), ()):
            yield Case(backend, variant.name, rows, "dealing")


def choose_variants(backend: str, variants: Sequence[Variant]) -> list[Variant]:
    """Return the variant that runs here by default, or those that decode."""
    here = [variant for variant in variants if variant.runnable]
    if backend == "FP8":
        return [variant for variant in here if (backend, variant.name) in DECODING][:1]
    return here[:1]
