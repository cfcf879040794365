"""No file of the package depends on itself, and each on those below it only, as ktk/README.md says.

Every import counts, also those inside functions and those for type checkers: what two files cannot
do without each other is one thing in two places.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

ROOT = next(folder / "ktk" for folder in Path(__file__).parents if (folder / "ktk").is_dir())
# An alternative constructor belongs to its class, and calls what is made of it.
LAZY = {
    (
        "ktk.checkpoint.packed.codec",
        "ktk.registry",
    ): "files may hold what their backend alone reads",
    ("ktk.linear", "ktk.registry"): "Linear takes a backend by its name",
    ("ktk.training", "ktk.names"): "any layer is trained with the products of the bf16 backend",
    ("ktk.training", "ktk.registry"): "which is loaded by its name",
    ("ktk.moe", "ktk.loading"): "MoE.from_checkpoint loads a layer, which is above layers",
}
Graph = Mapping[str, set[str]]


def modules() -> dict[str, Path]:
    """Return the files of the package by the names of their modules, compiled ones included."""
    found = {}
    for path in sorted([*ROOT.rglob("*.py"), *ROOT.rglob("*.pyi")]):
        parts = ("ktk", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, source: str, known: Iterable[str]) -> set[str]:
    """Return what a module imports of the package, wherever that stands in it.

    Importing a.b.c runs a and a.b first, which count unless they hold the module itself.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name} has a relative import"
            base = node.module or ""
            names = [
                full if (full := f"{base}.{alias.name}") in known else base for alias in node.names
            ]
        else:
            continue
        for one in names:
            found |= {one, *(parent for parent in parents(one) if parent != "ktk")}
    return {one for one in found if one in known and one != name and one not in parents(name)}


def parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def graph() -> dict[str, set[str]]:
    known = modules()
    return {
        name: imports(name, path.read_text(), known) if path.suffix == ".py" else set()
        for name, path in known.items()
    }


def circles(edges: Graph) -> list[list[str]]:
    """Return the strongly connected components of more than one module: Tarjan, 1972."""
    index: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(name: str) -> None:
        index[name] = lowest[name] = len(index)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in index:
                visit(other)
            if other in stack:
                lowest[name] = min(lowest[name], lowest[other])
        if lowest[name] == index[name]:
            at = stack.index(name)
            circle = sorted(stack[at:])
            del stack[at:]
            if len(circle) > 1:
                found.append(circle)

    for name in edges:
        if name not in index:
            visit(name)
    return found


def test_no_file_depends_on_itself() -> None:
    edges = {
        name: {other for other in others if (name, other) not in LAZY}
        for name, others in graph().items()
    }
    found = circles(edges)
    assert not found, "; ".join(
        f"{name} imports {', '.join(sorted(edges[name] & set(circle)))}"
        for circle in found
        for name in circle
    )


@pytest.mark.parametrize("arrow", LAZY, ids=" ".join)
def test_what_is_allowed_is_needed_and_waits_for_a_call(arrow: tuple[str, str]) -> None:
    name, other = arrow
    body = ast.parse(modules()[name].read_text()).body
    at_once = imports(name, ast.unparse(ast.Module(_outside_of_functions(body), [])), modules())
    assert other in graph()[name]
    assert other not in at_once
    assert LAZY[arrow]


def _outside_of_functions(body: list[ast.stmt]) -> list[ast.stmt]:
    return [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom, ast.If))]


def rows() -> list[list[str]]:
    """Return the first column of the table in ktk/README.md, from the bottom of the package up."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("|---") : text.index("\n\n## ")]
    return [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table.splitlines()[1:]]


def row_of(name: str) -> int:
    """Return the number of a module's row."""
    first = name.split(".")[1] if "." in name else "__init__"
    [found] = [number for number, row in enumerate(rows()) if first in row]
    return found


def test_every_file_stands_in_one_row() -> None:
    listed = [name for row in rows() for name in row]
    there = {name.split(".")[1] for name in modules() if "." in name} | {"__init__"}
    assert sorted(listed) == sorted(there)


def test_rows_import_rows_above_them_only() -> None:
    place = {name: row_of(name) for name in modules()}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if place[other] > place[name] and (name, other) not in LAZY
    ]
    assert not wrong, "; ".join(wrong)


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ({"ktk.a": "from ktk.b import x", "ktk.b": ""}, []),
        ({"ktk.a": "def f():\n    from ktk import b", "ktk.b": "import ktk.a"}, [["a", "b"]]),
        (
            {
                "ktk.a": "import ktk.b",
                "ktk.b": "if TYPE_CHECKING:\n    from ktk.c import x",
                "ktk.c": "from ktk.a import y",
                "ktk.d": "from ktk.a import y",
            },
            [["a", "b", "c"]],
        ),
        (
            {"ktk.p": "from ktk.p.one import x", "ktk.p.one": "import ktk.a", "ktk.a": ""},
            [],
        ),
        (
            {"ktk.p": "import ktk.a", "ktk.p.one": "", "ktk.a": "from ktk.p.one import x"},
            [["a", "p"]],
        ),
    ],
)
def test_circles_are_found(sources: dict[str, str], expected: list[list[str]]) -> None:
    found = circles({name: imports(name, text, sources) for name, text in sources.items()})
    assert [[name.removeprefix("ktk.") for name in circle] for circle in found] == expected
