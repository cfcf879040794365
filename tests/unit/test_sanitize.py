"""tools/sanitize: a folder is built for one kind of sanitizer, and errors of tools are shown.

Meson and ninja are stand-ins: nothing is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "sanitize"

# Keeps the kind in the folder, in one list or in one string, as versions of Meson do.
MESON = """#!/usr/bin/env python3
import json, os, sys
from pathlib import Path

command, *rest = sys.argv[1:]
if command == "setup":
    folder = Path(rest[0])
    [kind] = [one.partition("=")[2] for one in rest if one.startswith("-Db_sanitize=")]
    if kind == "memry":
        sys.exit(print("meson.build:1:0: ERROR: no sanitizer memry") or 1)
    folder.mkdir(parents=True)
    (folder / "build.ninja").write_text(kind)
elif command == "introspect":
    value = Path(rest[-1], "build.ninja").read_text()
    value = value.split(",") if os.environ["KINDS"] == "list" else value
    print(json.dumps([{"name": "b_lundef", "value": True}, {"name": "b_sanitize", "value": value}]))
else:
    print("no" if "--wrapper" in rest else "", "tests of", Path(rest[1]).name)
"""
NINJA = """#!/bin/sh
echo "kernel.cc:1: error: no such thing"
exit 1
"""


class Tree:
    """A copy of the tool, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir()
        (folder / "bin").mkdir()
        shutil.copy(TOOL, folder / "tools")
        for name, text in {"meson": MESON, "ninja": NINJA}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)

    def run(self, *arguments: str, kinds: str = "list") -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(self.folder / "bin"), os.environ["PATH"]])
        return subprocess.run(
            [self.folder / "tools" / "sanitize", *arguments],
            env=os.environ | {"PATH": path, "KINDS": kinds},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_each_kind_has_a_folder_of_its_own(tree: Tree) -> None:
    for kind in ("address", "address,undefined", "thread"):
        done = tree.run(kind)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"tests of build-{kind.replace(',', '-')}"


def test_tests_may_be_built_and_not_run(tree: Tree) -> None:
    done = tree.run("--build", "thread", "made")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "no tests of made\n"


@pytest.mark.parametrize("kinds", ["list", "string"])
def test_a_folder_of_another_kind_is_refused(tree: Tree, kinds: str) -> None:
    for again in range(2):
        done = tree.run("address,undefined", "made", kinds=kinds)
        assert done.returncode == 0, (again, done.stderr)
    done = tree.run("thread", "made", kinds=kinds)
    assert done.returncode == 2
    assert "made was built for address,undefined, not for thread" in done.stderr
    assert done.stdout == ""


def test_errors_of_meson_and_ninja_are_shown(tree: Tree) -> None:
    done = tree.run("memry")
    assert done.returncode == 1
    assert "ERROR: no sanitizer memry" in done.stderr
    done = tree.run("thread", "made", "tools/soak")
    assert done.returncode == 1
    assert "kernel.cc:1: error: no such thing" in done.stderr
