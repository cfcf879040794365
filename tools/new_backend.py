"""Start a backend: python tools/new_backend.py NAME [--dir ROOT]

Writes backends/<name>/ with a small one that works (f32 weights, plain loops), and adds it to
backends/meson.build and to the entry points in pyproject.toml. What comes out builds and passes
``python -m ktk.testing NAME`` at once; then replace it piece by piece. backends/README.md is the
author's guide.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "backend_template"
ENTRY_POINTS = '[project.entry-points."ktk.backends"]\n'


def fill(text: str, name: str) -> str:
    """Put the name of the backend into a template."""
    return text.replace("@NAME@", name.upper()).replace("@name@", name.lower())


def add_subdir(meson: str, name: str) -> str:
    """Add a line behind the last subdir() of backends/meson.build."""
    lines = meson.splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if line.startswith("subdir("))
    lines.insert(last + 1, f"subdir('{name.lower()}')\n")
    return "".join(lines)


def add_entry_point(pyproject: str, name: str) -> str:
    """Add the backend to its table in pyproject.toml, in alphabetical order."""
    head, table, tail = pyproject.partition(ENTRY_POINTS)
    if not table:
        raise SystemExit(f"pyproject.toml has no table {ENTRY_POINTS.strip()}")
    entries, blank, rest = tail.partition("\n\n")
    lines = [*entries.splitlines(), f'{name.upper()} = "ktk.backends.{name.lower()}"']
    return head + table + "\n".join(sorted(lines)) + blank + rest


def scaffold(name: str, root: Path) -> Path:
    """Write the files of a backend into a source tree of ktk and return its folder."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
        raise SystemExit(f"{name!r} is no name for a backend: letters and digits only")
    folder = root / "backends" / name.lower()
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    meson, pyproject = root / "backends" / "meson.build", root / "pyproject.toml"
    changed = {
        meson: add_subdir(meson.read_text(), name),
        pyproject: add_entry_point(pyproject.read_text(), name),
    }
    folder.mkdir()
    for source in sorted(TEMPLATE.iterdir()):
        (folder / source.name).write_text(fill(source.read_text(), name))
    for path, text in changed.items():
        path.write_text(text)
    return folder


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], usage="%(prog)s NAME [--dir ROOT]"
    )
    parser.add_argument("name", metavar="NAME", help="name that users type, such as INT6")
    parser.add_argument("--dir", type=Path, default=HERE.parent, help="root of ktk's source tree")
    options = parser.parse_args(arguments)
    folder = scaffold(options.name, options.dir)
    print(f"wrote {folder}")
    print("next: pip install --no-build-isolation -e .")
    print(f"      python -m ktk.testing {options.name.upper()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
