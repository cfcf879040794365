"""KML: our kernels, and products of the vendor's library, for which stand_in.c stands in.

The tests of whoever has no aarch64 processor: tools/aarch64/run runs them under emulation.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ktk.errors import BackendUnsupported
from ktk.registry import load_backend

HERE = Path(__file__).parent
on_aarch64 = pytest.mark.skipif(platform.machine() != "aarch64", reason="KML needs aarch64")
Build = Callable[..., Path]

# Loads KML and multiplies the same matrices in every variant that runs here.
PROGRAM = """
import ctypes, json, os, warnings
import numpy as np
import ktk
from ktk import _core

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    backend = ktk.load_backend("KML")

rng = np.random.default_rng(5)
weight = rng.standard_normal((300, 1000)).astype(np.float32)
codes = rng.integers(-128, 128, (300, 1000), dtype=np.int8)
scale = rng.random((300, 1), dtype=np.float32) + 0.5
rows = {m: rng.standard_normal((m, 1000)).astype(np.float32) for m in (1, 2, 7, 33)}
rows[7][3, 500] = np.nan
results = {}
for variant in backend.variants:
    if variant.runnable:
        matrices = (
            _core.PackedMatrix(backend.core, variant.name, weight),
            _core.PackedMatrix(backend.core, variant.name, codes, scale=scale),
        )
        results[variant.name] = [
            matrix.matmul(x).tobytes().hex() for matrix in matrices for x in rows.values()
        ]
pool = ktk.WorkerPool(3, pin=False)
sizes = dict(num_experts=2, num_experts_per_tok=2, hidden_size=64, intermediate_size=512)
shapes = ((2, 512, 64), (2, 512, 64), (2, 64, 512))
experts = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
layers = {}
for variant in results:
    moe = backend.moe(**sizes, variant=variant, pool=pool)
    moe.load(*experts)
    tokens = np.linspace(-1, 1, 40 * 64, dtype=np.float32).reshape(40, 64)
    out = moe(tokens, np.tile(np.array([[0, 1]]), (40, 1)), np.ones((40, 2), np.float32))
    layers[variant] = out.tobytes().hex()

counts = {}
if backend.library:
    library = ctypes.CDLL(backend.library["library"])
    counts = {
        name: getattr(library, f"stand_in_{name}")()
        for name in ("products", "told", "most_threads")
    }
print(json.dumps({
    "variants": [v.name for v in backend.variants if v.runnable],
    "library": backend.library,
    "warnings": [str(w.message) for w in caught],
    "results": results,
    "layers": layers,
    "counts": counts,
}))
"""


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile the stand-in, with options, as a library of a given name."""

    def compile_library(name: str, *options: str) -> Path:
        library = tmp_path_factory.mktemp("kml") / name
        if not any("WRONG" in option for option in options):
            options = (*options, "-DWRONG=0")
        command = [os.environ.get("CC", "cc"), "-O2", "-shared", "-fPIC", *options]
        subprocess.run([*command, "-o", str(library), str(HERE / "stand_in.c")], check=True)
        return library

    return compile_library


def run_program(**environment: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "LD_LIBRARY_PATH": "", "KTK_KML_LIBRARY": "", **environment},
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.skipif(platform.machine() == "aarch64", reason="KML runs here")
def test_on_another_processor_the_name_gives_one_sentence() -> None:
    with pytest.raises(BackendUnsupported, match=r"^backend 'KML' needs an aarch64 processor"):
        load_backend("KML")


@pytest.mark.parametrize("options", [(), ("-DTHREADS_OF_PROCESS",)])
def test_the_stand_in_is_a_product(build: Build, options: tuple[str, ...]) -> None:
    """The judge of the tests below, by hand; it needs no particular processor."""
    library = ctypes.CDLL(str(build("libstand_in.so", *options)))
    a, b, c = (
        (ctypes.c_int8 * 6)(1, 2, 3, -4, 5, 6),
        (ctypes.c_int8 * 3)(7, -8, 9),
        (ctypes.c_int32 * 2)(1, 1),
    )
    offset = ctypes.c_int32(0)
    whole, small, real, pointer = ctypes.c_int, ctypes.c_int8, ctypes.c_float, ctypes.c_void_p
    left, right = [pointer, whole, small], [pointer, whole, small]
    library.cblas_gemm_s8s8s32.argtypes = [
        *[whole] * 7, real, *left, *right, real, pointer, whole, pointer
    ]  # fmt: skip
    sizes = (101, 111, 112, 173, 2, 1, 3)
    library.cblas_gemm_s8s8s32(*sizes, 1.0, a, 3, 0, b, 3, 0, 0.0, c, 1, ctypes.byref(offset))
    assert list(c) == [7 - 16 + 27, -28 - 40 + 54]


@pytest.fixture(scope="session")
def ours() -> dict[str, Any]:
    return run_program()


@on_aarch64
def test_all_instruction_sets_give_the_same_bits(ours: dict[str, Any]) -> None:
    assert ours["variants"][-1] == "neon"
    assert ours["library"] is None
    assert not ours["warnings"]
    for name in ours["variants"]:
        assert ours["results"][name] == ours["results"]["neon"], name
        assert ours["layers"][name] == ours["layers"]["neon"], name


@on_aarch64
@pytest.mark.parametrize("options", [(), ("-DTHREADS_OF_PROCESS",)])
def test_products_of_the_library_are_the_same_bits(
    ours: dict[str, Any], build: Build, options: tuple[str, ...]
) -> None:
    library = build("libmine.so", *options)
    theirs = run_program(KTK_KML_LIBRARY=str(library))
    assert theirs["variants"] == ["cblas_s8", *ours["variants"]]
    assert theirs["library"] == {"library": str(library), "mode": "cblas_gemm_s8s8s32"}
    assert not theirs["warnings"]
    assert theirs["results"]["cblas_s8"] == ours["results"]["neon"]
    assert theirs["layers"]["cblas_s8"] == ours["layers"]["neon"]
    # The self-test, and two matrices of two tiles and 4 groups for each of 4 numbers of rows.
    assert theirs["counts"]["products"] > 1 + 2 * 4 * 2 * 4
    assert theirs["counts"]["most_threads"] == 1
    assert theirs["counts"]["told"] > 1, "every worker has to tell it"


@on_aarch64
@pytest.mark.parametrize("name", ["libkml_rt.so", "libkblas.so"])
def test_the_library_is_found_by_its_name(build: Build, name: str) -> None:
    library = build(name)
    found = run_program(LD_LIBRARY_PATH=str(library.parent))
    assert found["library"]["library"] == str(library)
    assert found["variants"][0] == "cblas_s8"


@on_aarch64
@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("-DWRONG=1", "cblas_gemm_s8s8s32 gives -?\\d+ instead of -?\\d+ in a product of"),
        ("-DWRONG=2", "cblas_gemm_s8s8s32 gives 1515870810 instead of"),
        ("-DWRONG=3", "cblas_gemm_s8s8s32 does not export cblas_gemm_s8s8s32"),
    ],
)
def test_a_library_that_fails_the_self_test_is_passed_over(
    ours: dict[str, Any], build: Build, option: str, reason: str
) -> None:
    library = build("libwrong.so", option)
    found = run_program(KTK_KML_LIBRARY=str(library))
    assert found["library"] is None
    assert found["variants"] == ours["variants"]
    [warning] = found["warnings"]
    assert warning.startswith(
        f"KML computes with its own kernels: KTK_KML_LIBRARY={library} cannot be used: "
    )
    assert re.search(reason, warning), warning


@on_aarch64
def test_a_library_that_is_not_there_is_named() -> None:
    found = run_program(KTK_KML_LIBRARY="/nowhere/libkml.so")
    [warning] = found["warnings"]
    assert warning.endswith(
        "KTK_KML_LIBRARY=/nowhere/libkml.so cannot be used: there is no such library"
    )
