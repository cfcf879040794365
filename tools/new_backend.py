"""Start a backend: new_backend.py NAME [--package DIR | --dir ROOT]

With --package it writes a package of its own into DIR, which builds against an installed ktk.
Without, it writes backends/<name>/ into ktk's source tree (where ktk is installed from one, by
pip install -e, into that one), and adds it to backends/meson.build and to the entry points in
pyproject.toml. Either is a small one that works (f32 weights, plain loops):
it builds and passes ``python -m ktk.testing NAME`` at once; then replace it piece by piece.
backends/README.md is the author's guide.

In ktk's source tree this is tools/new_backend.py; in an installed ktk, python -m
ktk.testing.new_backend.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
TEMPLATE = HERE / "backend_template"
PACKAGE = HERE / "package_template"
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
    lines = [*entries.splitlines(), f'{name.upper()} = "ktk._backends.{name.lower()}"']
    return head + table + "\n".join(sorted(lines)) + blank + rest


def check_name(name: str) -> None:
    """End with a sentence where a name cannot be that of a backend."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9]*", name):
        raise SystemExit(f"{name!r} is no name for a backend: letters and digits only")


@contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it where not all of it can be written."""
    folder.mkdir(parents=True)
    try:
        yield
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def write(files: list[Path], folder: Path, name: str) -> None:
    """Write templates into a folder."""
    folder.mkdir(exist_ok=True)
    for source in sorted(files):
        (folder / source.name).write_text(fill(source.read_text(), name))


def scaffold(name: str, root: Path) -> Path:
    """Write the files of a backend into a source tree of ktk and return its folder."""
    check_name(name)
    folder = root / "backends" / name.lower()
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    meson, pyproject = root / "backends" / "meson.build", root / "pyproject.toml"
    if not meson.exists():
        raise SystemExit(
            f"{root} is no source tree of ktk: say --dir ROOT, or --package DIR for a package of"
            " its own"
        )
    before = {path: path.read_text() for path in (meson, pyproject)}
    changed = {
        meson: add_subdir(before[meson], name),
        pyproject: add_entry_point(before[pyproject], name),
    }
    with new_folder(folder):
        write(list(TEMPLATE.iterdir()), folder, name)
        try:
            for path, text in changed.items():
                path.write_text(text)
        except OSError:
            for path, text in before.items():
                path.write_text(text)
            raise
    return folder


def package(name: str, folder: Path) -> Path:
    """Write a package with a backend into a folder that does not exist, and return it."""
    check_name(name)
    if folder.exists():
        raise SystemExit(f"{folder} exists already")
    if set("[]") & set(str(folder)):
        raise SystemExit(f"{folder}: pip takes what is in [ ] for extras; name another folder")
    sources = [path for path in TEMPLATE.iterdir() if path.suffix in (".cc", ".h")]
    with new_folder(folder):
        write([*PACKAGE.glob("*.*"), TEMPLATE / "README.md"], folder, name)
        write(sources, folder / name.lower(), name)
    return folder


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description="Write a small backend that works, to start from.",
        usage="%(prog)s NAME [--package DIR | --dir ROOT]",
    )
    parser.add_argument("name", metavar="NAME", help="name that users type, such as INT6")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--package", type=Path, metavar="DIR", help="new folder for a package")
    where.add_argument(
        "--dir",
        type=Path,
        metavar="ROOT",
        default=HERE.parent,
        help="ktk's source tree; default: the one that this script is in",
    )
    options = parser.parse_args(arguments)
    try:
        if options.package:
            folder = package(options.name, options.package)
            # Without a point, pip looks for a package of that name in an index.
            here = folder if folder.is_absolute() else f".{os.sep}{folder}"
            install = f"pip install --no-build-isolation {shlex.quote(str(here))}"
        else:
            folder = scaffold(options.name, options.dir)
            install = "pip install --no-build-isolation -e ."
    except OSError as error:
        raise SystemExit(f"nothing usable was written: {error}") from None
    print(f"wrote {folder}")
    print(f"next: {install}")
    print(f"      python -m ktk.testing {options.name.upper()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
