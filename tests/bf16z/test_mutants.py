"""The cases of test_layout bite: BF16Z with a fault in its encoder, compiled here, fails them."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patterns import U16, largest_in_last_lanes, last_lane, other_escapes, pack, zero_block

import ktk
from ktk import _core

ROOT = Path(__file__).parents[2]
TARGET, FLAGS = {
    "x86_64": ("avx2", ["-march=x86-64-v3"]),
    "aarch64": ("neon", ["-march=armv8-a"]),
}.get(platform.machine(), ("", []))
if not TARGET:
    pytest.skip("BF16Z has no variant here", allow_module_level=True)

TABLE = """
#include "bf16z/kernel_TARGET.cc"
#include "table.h"
static const ktk_format kFormats[] = {{KTK_BF16, KTK_NONE, KTK_NONE, 0, 0}};
static const ktk_accept kAccepts[] = {{kFormats[0], 0}};
extern "C" { extern const ktk_backend mutant; }
BACKEND(mutant, &ktk_bf16z_TARGET)
"""


_EXPONENT = "\n      const uint16_t exponent = weights[i] & 0x7f80;\n"
# A name, what it is changed in, and the case that shows it: file, text, what takes its place.
Change = tuple[str, str, str]
MUTANTS: dict[str, tuple[list[Change], Callable[[], U16]]] = {
    "a wrong escape": (
        [("encode.h", "make_patch(bits, weight);", "make_patch(bits ^ 1, weight);")],
        other_escapes,
    ),
    "an escape in the last lane lost": (
        [
            (
                "encode.h",
                "_mm256_movemask_epi8(found));",
                "_mm256_movemask_epi8(found)) & ~0u >> 1;",
            ),
            ("encode.h", "if (!index) patches", "if (!index && word + 1 < kLine / 2) patches"),
        ],
        last_lane,
    ),
    "the largest exponent sought in all lanes but the last": (
        [
            (
                "table.h",
                f"i < count; ++i) {{{_EXPONENT}      largest",
                f"i + 1 < count; ++i) {{{_EXPONENT}      largest",
            )
        ],
        largest_in_last_lanes,
    ),
    "blocks of zeros filled with zeros": (
        [
            (
                "weight_codec.h",
                "    patches_of_steps(block.header)[i] =",
                "    if (table.exponents[0] == 0) memset(block.step(i), 0, kStepBytes);\n"
                "    patches_of_steps(block.header)[i] =",
            )
        ],
        zero_block,
    ),
}
CASES = [case for _, case in MUTANTS.values()]


def compiled(folder: Path, changes: list[Change]) -> _core.Backend:
    """Compile a variant of BF16Z with changes."""
    shutil.copytree(ROOT / "backends" / "bf16z", folder / "bf16z")
    for name, text, other in changes:
        path = folder / "bf16z" / name
        before = path.read_text()
        assert before.count(text) == 1, f"{name} has {before.count(text)} times {text!r}"
        path.write_text(before.replace(text, other))
    source, library = folder / "mutant.cc", folder / "mutant.so"
    source.write_text(TABLE.replace("TARGET", TARGET))
    roots = [folder, ROOT / "backends", ROOT / "tests" / "mutants"]
    include = [*(f"-I{root}" for root in roots), "-isystem", ktk.get_include()]
    flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", *FLAGS, f"-DKTK_TARGET={TARGET}"]
    subprocess.run(["c++", *flags, *include, source, "-o", library], check=True)
    table = ctypes.c_char.in_dll(ctypes.CDLL(str(library)), "mutant")
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule: Any = new_capsule(ctypes.addressof(table), b"ktk.backend", None)
    return _core.Backend(capsule)


def keeps(core: _core.Backend, weights: U16) -> bool:
    """Whether every bit comes back."""
    [data, *_] = pack(core, TARGET, weights).exported()
    return bool((data.view(np.uint16) == weights).all())


@pytest.mark.slow
def test_the_cases_pass_without_a_fault(tmp_path: Path) -> None:
    core = compiled(tmp_path, [])
    assert all(keeps(core, case()) for case in CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_fault_is_found_by_its_case(name: str, tmp_path: Path) -> None:
    changes, case = MUTANTS[name]
    core = compiled(tmp_path, changes)
    assert not keeps(core, case())
