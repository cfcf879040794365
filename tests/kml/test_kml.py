"""KML: our kernels, and products of the vendor's library, for which stand_in.c stands in.

The tests of whoever has no aarch64 processor: tools/aarch64/run runs them under emulation.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shlex
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

# Multiplies the same matrices in every variant of KML that runs here, each in a thread of its own.
# The package is bypassed: torch, which it imports, takes most of a minute under emulation.
PROGRAM = """
import ctypes, importlib, importlib.util, json, sys, threading, types, warnings
import numpy as np

package = types.ModuleType("ktk")
package.__path__ = list(importlib.util.find_spec("ktk").submodule_search_locations)
sys.modules["ktk"] = package
_core = importlib.import_module("ktk._core")
module = importlib.import_module("ktk._backends.kml")

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    backend = _core.Backend(module.__ktk_backend__())
library = module.__ktk_library__()

rng = np.random.default_rng(5)
weight = rng.standard_normal((300, 600)).astype(np.float32)
codes = rng.integers(-128, 128, (300, 600), dtype=np.int8)
scale = rng.random((300, 1), dtype=np.float32) + 0.5
rows = [rng.standard_normal((m, 600)).astype(np.float32) for m in (1, 2, 7, 33)]
rows[2][3, 500] = np.nan
results = {}

def multiply(variant):
    matrices = (
        _core.PackedMatrix(backend, variant, weight),
        _core.PackedMatrix(backend, variant, codes, scale=scale),
    )
    results[variant] = [m.matmul(x).tobytes().hex() for m in matrices for x in rows]

variants = [variant.name for variant in backend.variants if variant.runnable]
for variant in variants:
    thread = threading.Thread(target=multiply, args=(variant,))
    thread.start()
    thread.join()
names = ("products", "told", "most_threads") if library else ()
counts = {name: getattr(ctypes.CDLL(library["library"]), f"stand_in_{name}")() for name in names}
print(json.dumps({
    "variants": variants,
    "library": library,
    "warnings": [str(w.message) for w in caught],
    "results": results,
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
        command = [*shlex.split(os.environ.get("CC", "cc")), "-O2", "-shared", "-fPIC", *options]
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
    left: list[Any]
    right: list[Any]
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
    # The self-test; then two matrices of two tiles and three groups for four numbers of rows.
    assert theirs["counts"]["products"] == 1 + 2 * (2 * 3) * 4
    # The thread of the self-test and that of the products.
    assert theirs["counts"]["told"] == 2
    assert theirs["counts"]["most_threads"] == 1


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
        f"KML computes with its own kernels: KTK_KML_LIBRARY names what cannot be used: {library}: "
    )
    assert re.search(reason, warning), warning


@on_aarch64
def test_a_library_that_is_not_there_is_named() -> None:
    found = run_program(KTK_KML_LIBRARY="/nowhere/libkml.so")
    [warning] = found["warnings"]
    assert warning.endswith("KTK_KML_LIBRARY=/nowhere/libkml.so: there is no such library")
