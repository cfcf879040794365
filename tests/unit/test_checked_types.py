"""mypy reads all of Python that is here: what its `files` name, and what these import."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
# In folders of their own with a pyproject.toml, or templates of files to come.
OTHERS = ("tests/thirdparty/", "tools/backend_template/")


def named() -> set[Path]:
    found: set[Path] = set()
    for pattern in SETTINGS["files"]:
        for path in ROOT.glob(pattern):
            found |= set(path.rglob("*.py")) if path.is_dir() else {path}
    return found


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def reached() -> set[Path]:
    """Return the files that mypy reads."""
    found, new = set[Path](), named()
    while new:
        found |= new
        names = {name for path in new for name in imported(path)}
        new = {
            file
            for name in names
            for folder in SETTINGS["mypy_path"]
            if (file := ROOT / folder / f"{name.replace('.', '/')}.py").is_file()
        } - found
    return found


def test_no_file_is_left_out() -> None:
    files = {path for folder in ("tests", "tools", "ktk") for path in (ROOT / folder).rglob("*.py")}
    left = {str(path.relative_to(ROOT)) for path in files - reached()}
    left = {
        name for name in left if not name.startswith(OTHERS) and not name.endswith("__init__.py")
    }
    assert not left, f"list these in `files` of mypy in pyproject.toml, or import them: {left}"
