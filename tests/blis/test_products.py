"""What BLIS computes with the libraries that it finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from blis_tools import debian, python, standin

from ktk.testing import BACKEND, LAYER

# Whole layers: the bits of all variants, with what the stand-in counted.
LAYERS = """
import ctypes, json, os, warnings
import numpy as np, ktk
warnings.simplefilter("ignore")
random = np.random.default_rng(7)
E, K, H, I = 4, 2, 530, 1060
gate, up = (random.standard_normal((E, I, H), np.float32) for _ in range(2))
down = random.standard_normal((E, H, I), np.float32)
pool = ktk.WorkerPool(3, pin=False)

def layer(name, variant):
    made = ktk.load_backend(name).moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I,
        variant=variant, pool=pool,
    )
    made.load(gate, up, down)
    return made

def results(made):
    found = []
    for tokens in (1, 3, 40):
        hidden = random_hidden[:tokens]
        found.append(np.asarray(made(hidden, ids[:tokens], weights[:tokens])))
    return found

random_hidden = random.standard_normal((40, H), np.float32)
ids = random.integers(0, E, (40, K))
weights = random.random((40, K), np.float32)
threads = len(os.listdir("/proc/self/task"))
variants = [variant.name for variant in ktk.load_backend("BLIS").variants]
made = {name: layer("BLIS", name) for name in variants}
bits = {name: results(one) for name, one in made.items()}
first = bits[variants[0]]
same = all(np.array_equal(a, b) for other in bits.values() for a, b in zip(first, other))
parts = [np.asarray(part) for part in made[variants[0]].unpack_expert(1)]
plain = [np.asarray(part) for part in layer("AMXINT8", "avx2").unpack_expert(1)]
counts = {}
if "standin" in os.environ["KTK_BLIS_LIBRARY"]:
    library = ctypes.CDLL(os.environ["KTK_BLIS_LIBRARY"])
    for word in ("calls", "with_threads", "not_null"):
        counts[word] = ctypes.c_int64.in_dll(library, f"standin_{word}").value
print(json.dumps({
    "variants": variants,
    "same": same,
    "finite": bool(np.isfinite(np.concatenate(first)).all()),
    "weights": all(np.array_equal(a, b) for a, b in zip(parts, plain)),
    "threads": len(os.listdir("/proc/self/task")) - threads,
    "counts": counts,
}))
"""


def check_layers(library: Path, variants: list[str]) -> dict[str, int]:
    found = python(LAYERS, KTK_BLIS_LIBRARY=str(library), OMP_NUM_THREADS="4")
    assert found["variants"] == variants
    assert found["same"], "int8 and float products have the same bits"
    assert found["finite"]
    assert found["weights"], "unpacked weights are those of any other int8 with a scale per row"
    assert found["threads"] == 0, "the library started threads beside ktk's workers"
    counts: dict[str, int] = found["counts"]
    return counts


@pytest.mark.parametrize(
    ("variations", "variants"),
    [((), ["lpgemm_int8", "sgemm"]), (("DLP",), ["lpgemm_int8"]), (("NO_LPGEMM",), ["sgemm"])],
    ids=["AOCL-BLIS", "AOCL-DLP", "BLIS"],
)
def test_layers_on_the_stand_in(variations: tuple[str, ...], variants: list[str]) -> None:
    counts = check_layers(standin(*variations), variants)
    assert counts["calls"] > 100
    assert counts["with_threads"] == 0, "a worker did not ask for one thread before it called"
    assert counts["not_null"] == 0, "the trailing pointer of LPGEMM has to be NULL"


@pytest.mark.parametrize("flavour", ["openmp", "pthread", "serial"])
def test_layers_on_debians_library(flavour: str) -> None:
    path = debian(flavour)
    if path is None:
        pytest.skip(f"the package libblis4-{flavour} is not installed")
    check_layers(path, ["sgemm"])


@pytest.mark.slow
@pytest.mark.parametrize(("modules", "examples"), [(BACKEND, 12), (LAYER, 3)])
def test_the_kit_passes_on_the_stand_in(
    modules: tuple[str, ...], examples: int, tmp_path: Path
) -> None:
    """On the library that is installed, tests/conformance runs it."""
    kit = f"-p ktk.testing.plugin --pyargs {' '.join(modules)} --ktk-backend BLIS"
    options = f"--ktk-profile ci --ktk-examples {examples} -q -p no:cacheprovider"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *kit.split(), *options.split()],
        env={**os.environ, "KTK_BLIS_LIBRARY": str(standin())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
