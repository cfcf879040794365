"""The AMX variants without AMX: everything that would trap is done in software, and counted.

Each test is a pytest of its own process. It is denied tile data first, so that these tests run in
the same way on CPUs with AMX and without.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import amx_tools
import pytest

from ktk.testing import BACKEND, LAYER

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(bool(amx_tools.why_not()), reason=amx_tools.why_not() or "-")
# Then tests/conformance runs the same without software, and longer.
HAS_AMX = "amx_tile" in amx_tools.cpu_flags()


def run_emulated(folder: Path, *arguments: str) -> tuple[str, dict[str, int]]:
    """Return the output and the instructions that were done in software."""
    counts = folder / "counts.json"
    script = HERE / "run_emulated.py"
    # No conftest from above: pytest may name it, and with it a module of its own making, after the
    # folders it lies in, and the checkout's is called ktk.
    places = ["--rootdir", HERE, "--confcutdir", HERE]
    command = [sys.executable, script, counts, "-q", *places, *arguments]
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout, done.stdout
    return done.stdout, json.loads(counts.read_text())


def test_machine_code_runs_on_software_tiles(tmp_path: Path) -> None:
    options = ("--import-mode=importlib", "-k", "hardware")
    _, counts = run_emulated(tmp_path, str(HERE / "test_soft_core.py"), *options)
    for op in ("tileloadd", "tileloaddt1", "tilestored", "tdpbssd", "tdpbusd", "tdpbf16ps"):
        assert counts[op] > 0, counts


@pytest.mark.parametrize(
    ("word", "op"),
    [
        ("int8", "tdpbsud"),
        ("int4", "tdpbsud"),
        ("ggml", "tdpbssd"),
        ("bf16", "tdpbf16ps"),
        ("scaled", "tdpbf16ps"),
    ],
)
def test_backends_are_exact_on_software_tiles(word: str, op: str, tmp_path: Path) -> None:
    options = ("--import-mode=importlib", "-k", word)
    output, counts = run_emulated(tmp_path, str(HERE / "test_exact.py"), *options)
    assert " passed" in output
    assert counts[op] > 100, counts
    assert counts["tileloadd"] + counts["tileloaddt1"] > 100, counts


def test_kernels_use_tiles_sparingly(tmp_path: Path) -> None:
    options = ("--import-mode=importlib", "-k", "not configure")
    output, counts = run_emulated(tmp_path, str(HERE / "test_counts.py"), *options)
    assert " passed" in output
    assert counts["tilestored"] > 0


@pytest.mark.skipif(
    HAS_AMX,
    reason="ldtilecfg touches no tile data: this CPU executes it, and nothing can count",
)
def test_kernels_configure_tiles_once(tmp_path: Path) -> None:
    options = ("--import-mode=importlib", "-k", "configure")
    output, counts = run_emulated(tmp_path, str(HERE / "test_counts.py"), *options)
    assert " passed" in output
    assert counts["ldtilecfg"] > 0


@pytest.mark.parametrize(
    ("name", "variant", "op"),
    [
        ("BF16", "amx_bf16", "tdpbf16ps"),
        ("BF16Z", "amx_bf16", "tdpbf16ps"),
        ("FP8", "amx_bf16", "tdpbf16ps"),
        ("MXFP4", "amx_bf16", "tdpbf16ps"),
        ("AMXINT8", "amx_int8", "tdpbsud"),
        ("AMXINT4", "amx_int8", "tdpbsud"),
        ("RAWINT4", "amx_int8", "tdpbssd"),
        ("LLAMAFILE", "amx_int8", "tdpbssd"),
    ],
)
@pytest.mark.parametrize(
    ("modules", "examples"), [(BACKEND, 5), (LAYER, 2)] if HAS_AMX else [(BACKEND, 15), (LAYER, 4)]
)
def test_backends_pass_the_kit_on_software_tiles(
    name: str, variant: str, op: str, modules: tuple[str, ...], examples: int, tmp_path: Path
) -> None:
    # Instructions are counted in the process that runs them.
    options = f"--ktk-backend {name} --ktk-variant {variant} --ktk-profile ci --ktk-no-isolation"
    properties = f"--pyargs {' '.join(modules)} --ktk-examples {examples}"
    kit = f"-p ktk.testing.plugin {properties} {options}"
    # LLAMAFILE has nothing to export, since it stores what is given, and alone an act_format.
    absent = ["export" if name == "LLAMAFILE" else "activations_depend_on_their_format"]
    if name != "BF16Z":
        absent.append("packed_bytes_are_told_from_others")  # which files keep of BF16Z only
    if name not in ("BF16", "BF16Z", "LLAMAFILE"):
        absent.append("infinite_weights")  # which codes have not
    _, counts = run_emulated(tmp_path, *kit.split(), "-k", f"not ({' or '.join(absent)})")
    assert counts[op] > 100, counts
