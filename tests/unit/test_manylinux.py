"""Wheels run with old system libraries: what is newer in them is known to native/manylinux.

tools/release has auditwheel check the wheel that it makes; this says it of any build with the glibc
that wheels are made with, so that a new call of a system function is noticed when it is written.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ktk.entries import entry_points
from ktk.registry import GROUP

MANYLINUX = Path(__file__).parents[2] / "native" / "manylinux"
# Of manylinux_2_28: https://github.com/pypa/auditwheel, policy/manylinux-policy.json.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}
SYMBOL = re.compile(r"\*UND\*.*\b(GLIBC|GLIBCXX|CXXABI)_([\d.]+)\)? +(\w+)$", re.MULTILINE)

OURS = [entry.value for entry in entry_points(GROUP) if entry.value.startswith("ktk.")]


def too_new(table: str) -> set[str]:
    """Return the symbols in what `objdump -T` printed that old libraries lack."""
    return {
        symbol
        for library, version, symbol in SYMBOL.findall(table)
        if tuple(map(int, version.split("."))) > NEWEST[library]
    }


def test_versions_are_compared_by_numbers() -> None:
    table = """
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.2.5) memcpy
0000000000000000      DF *UND*\t0000000000000000 (GLIBC_2.33)  fstat64
0000000000000000      DF *UND*\t0000000000000000  GLIBC_2.28 statx
0000000000000000      DF *UND*\t0000000000000000 (GLIBCXX_3.4.9) _ZNSo9_M_insert
0000000000000000      DO *UND*\t0000000000000000  GLIBC_2.32 __libc_single_threaded
"""
    assert too_new(table) == {"fstat64", "__libc_single_threaded"}


@pytest.mark.parametrize("module", ["ktk._core", "ktk._probe", *OURS])
def test_new_symbols_are_known(module: str) -> None:
    if platform.libc_ver() != ("glibc", "2.36"):
        pytest.skip("wheels are made with glibc 2.36, of Debian 12: others have other new symbols")
    objdump = shutil.which("objdump")
    if not objdump:
        pytest.skip("objdump of binutils is missing")
    spec = importlib.util.find_spec(module)
    if not spec:
        pytest.skip("not built for this architecture")
    assert spec.origin
    table = subprocess.run([objdump, "-T", spec.origin], capture_output=True, text=True, check=True)
    assert SYMBOL.search(table.stdout)
    sources = [MANYLINUX / name for name in ("old_symbols.h", "new_symbols.cc")]
    known = re.sub(r"//.*", "", "".join(path.read_text() for path in sources))
    unknown = {one for one in too_new(table.stdout) if not re.search(rf"\b{one}\b", known)}
    assert not unknown, f"native/manylinux has nothing for {', '.join(sorted(unknown))}"
