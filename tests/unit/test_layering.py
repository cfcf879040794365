"""Who may know what: folders of the core, intrinsics, names of formats and of backends."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktk.dtypes import DTYPES
from ktk.formats import TORCH_NAMES

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "native"
INCLUDE = re.compile(r'^#include "(\w+)/', re.MULTILINE)
INTRINSICS = re.compile(
    r"#include <(?:\w*intrin|arm_\w+)\.h>|\b_mm\d*_\w+\(|\b__m(?:128|256|512)\w*\b"
    r"|\b(?:u?int|b?float)\d+x\d+_t\b"
)
INTRINSICS_IN = ("native/ops", "native/probe")
# Where "BF16" is a dtype of safetensors, and no backend.
DTYPES_OF_FILES = ROOT / "ktk" / "checkpoint"
TABLE_OF_NAMES = ROOT / "ktk" / "names.py"


def sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix in (".cc", ".h", ".c"))


def code(path: Path) -> str:
    """Return a C++ file without its comments."""
    return re.sub(r"//.*|/\*.*?\*/", "", path.read_text())


def allowed_includes() -> dict[str, set[str]]:
    """Read the table of native/README.md: for each folder, those it may include headers of."""
    rows = {}
    for line in (NATIVE / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            rows[cells[0].strip("`")] = set(re.findall(r"`(\w+)`", cells[3]))
    return {folder.replace("include/ktk", "include"): rows[folder] for folder in rows}


def test_the_table_names_all_folders() -> None:
    folders = {path.name for path in NATIVE.iterdir() if path.is_dir()}
    assert allowed_includes().keys() == folders


@pytest.mark.parametrize("folder", allowed_includes())
def test_folders_of_the_core_include_what_the_readme_says(folder: str) -> None:
    allowed = {folder, "ktk"} | allowed_includes()[folder]
    for path in sources(NATIVE / folder):
        beyond = set(INCLUDE.findall(path.read_text())) - allowed
        assert not beyond, f"{path.relative_to(ROOT)} includes {', '.join(sorted(beyond))}"


def test_the_arrows_between_folders_have_no_circle() -> None:
    arrows = allowed_includes()
    while leaves := {folder for folder, to in arrows.items() if not to & arrows.keys()}:
        arrows = {folder: to for folder, to in arrows.items() if folder not in leaves}
    assert not arrows


def test_intrinsics_stand_where_contributing_says() -> None:
    assert INTRINSICS.search("__m512i x = _mm512_setzero_si512();")
    assert INTRINSICS.search("#include <arm_neon.h>")
    for path in sources(NATIVE):
        if not str(path.relative_to(ROOT)).startswith(INTRINSICS_IN):
            found = INTRINSICS.search(code(path))
            assert not found, f"{path.relative_to(ROOT)} has {found and found[0]!r}"
    assert any(INTRINSICS.search(code(path)) for path in sources(NATIVE / "probe"))


def format_names() -> set[str]:
    """Return the names of all elements, from the core's table of them."""
    return set(
        re.findall(r'\{KTK_\w+(?: \+ \d+)?, "(\w+)"', (NATIVE / "format/elements.cc").read_text())
    )


def test_the_pipeline_names_no_format() -> None:
    """Formats are data there: f32 is what sums are in, and nothing else has a name."""
    names = format_names()
    assert {"bf16", "e4m3", "q4_k"} <= names
    for path in (*sources(NATIVE / "moe"), *sources(NATIVE / "core")):
        text = code(path)
        named = set(re.findall(r'"(\w+)"', text)) & names
        named |= {word.lower() for word in re.findall(r"\bKTK_(\w+)", text)} & (names - {"f32"})
        assert not named, f"{path.relative_to(ROOT)} names {', '.join(sorted(named))}"


def backend_names() -> set[str]:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return set(document["project"]["entry-points"]["ktk.backends"])


def strings(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the strings of a module that are no docstrings, and their lines."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            yield node.value, node.lineno


@pytest.mark.parametrize(
    "path", sorted((ROOT / "ktk").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_no_backend_is_named_outside_of_one_table(path: Path) -> None:
    names = backend_names()
    if path == TABLE_OF_NAMES:
        assert {text for text, _ in strings(path)} & names
        return
    if path.is_relative_to(DTYPES_OF_FILES):
        names = names - {"BF16"}
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    for text, line in strings(path):
        found = word.search(text)
        assert not found, f"{path.relative_to(ROOT)}:{line} names {found and found[0]}"


def float_names(node: ast.Dict) -> set[str]:
    """Return what of a dictionary names dtypes of floats: torch.bfloat16, or "bfloat16"."""
    found = set()
    for one in (*node.keys, *node.values):
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
            found.add(one.attr if one.value.id == "torch" else "")
        elif isinstance(one, ast.Constant):
            found.add(str(one.value))
    return found & set(TORCH_NAMES.values())


def test_one_table_says_which_dtypes_of_torch_floats_are() -> None:
    tables = {}
    for path in sorted((ROOT / "ktk").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Dict) and len(names := float_names(node)) > 1:
                tables[f"{path.relative_to(ROOT)}:{node.lineno}"] = names
    [(place, names)] = tables.items()
    assert place.startswith("ktk/formats.py:")
    assert names == set(TORCH_NAMES.values())
    assert {name: f"torch.{one}" for name, one in TORCH_NAMES.items()} == {
        name: str(dtype) for name, dtype in DTYPES.items()
    }
