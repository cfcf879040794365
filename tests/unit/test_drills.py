"""CONTRIBUTING's table is true: as many files as it names know an option that is there already."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ktk", "native", "backends", "tools")


def mentions(pattern: str) -> set[str]:
    """Return the files, but tests and pages, that match a pattern; generated ones count, too."""
    found = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            is_code = path.suffix in (".py", ".pyi", ".cc", ".h", ".c", ".build", ".in")
            if is_code and re.search(pattern, path.read_text(), re.IGNORECASE):
                found.add(str(path.relative_to(ROOT)))
    return found


def listed(task: str) -> list[str]:
    """Return the files that CONTRIBUTING's row of a task names."""
    rows = (ROOT / "CONTRIBUTING.md").read_text().splitlines()
    [row] = [line for line in rows if line.startswith(f"| {task} |")]
    return re.findall(r"`([\w/]+\.\w+)`", row.split("|")[2])


@pytest.mark.parametrize(
    ("task", "most", "pattern", "others"),
    [
        ("add an activation function", 4, "gelu_tanh", set()),
        # What kt-kernel's argument swiglu_alpha means is that interface's own matter.
        ("add an option of a layer", 5, "clamp_gate_below", {"ktk/ktmoe/arguments.py"}),
    ],
)
def test_as_many_files_know_one(task: str, most: int, pattern: str, others: set[str]) -> None:
    files = listed(task)
    assert len(files) <= most
    assert mentions(rf"\b(?:ktk_)?{pattern}\b") == set(files) | others


def test_as_many_files_know_an_instruction_set() -> None:
    known = mentions(r"\b(?:KTK_ISA_)?avx_vnni\b")
    outside = {one for one in known if not one.startswith("backends/")}
    # The row calls the fourth <name>.cc, and names a file that other sets are in instead of that.
    others = {"native/probe/avx_vnni.cc", "native/probe/meson.build"}
    named = set(listed("add an instruction set")) - others
    assert len(outside) == 4
    assert {Path(one).name for one in named} == {Path(one).name for one in outside - others}
    # In a backend, what builds its kernel; LLAMAFILE's has two kinds of blocks besides.
    built = {one for one in known if one.startswith("backends/") and one.endswith("meson.build")}
    assert known - outside - built == {"backends/llamafile/floats/blocks_kernel.h"}
