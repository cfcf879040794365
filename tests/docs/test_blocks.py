"""Blocks of Python and shell in README and docs run as they stand, or the page says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from blocks import PAGES, ROOT, RUN, Block, blocks, indented_commands

# Set-up commands that tools/fresh reads, and runs on a new machine.
INDENTED = {ROOT / "README.md": 3}
LIMIT = 600


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_stand_in_fenced_blocks(page: Path) -> None:
    assert len(indented_commands(page)) == INDENTED.get(page, 0), indented_commands(page)


def test_reasons_are_sentences() -> None:
    reasons = [one.reason for page in PAGES for one in blocks(page) if one.reason]
    assert all(len(one.split()) >= 2 for one in reasons), reasons


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(one.language in RUN and not one.reason for one in blocks(page))],
    ids=name,
)
def test_blocks_run(page: Path, workplace: Path) -> None:
    """Run a page from top to bottom: its blocks of Python share their names, and all a folder."""
    module = ModuleType("__main__")
    ran = 0
    for block in blocks(page):
        if block.language not in RUN or block.reason or missing(block):
            continue
        if block.language == "sh":
            run_shell(block)
        else:
            run_python(block, vars(module))
        ran += 1
    if not ran:
        pytest.skip("what the blocks of this page need is not installed")


def missing(block: Block) -> bool:
    return bool(block.needs) and shutil.which(block.needs) is None


def run_shell(block: Block) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{block.first}\n{block.code}"],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    said = f"{block}: status {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said


def run_python(block: Block, names: dict[str, Any]) -> None:
    # Lines of a traceback are those of the page.
    code = "\n" * (block.line - 1) + block.code
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if block.first:
            exec(compile(block.first, f"{block}, run first", "exec"), names)
        exec(compile(code, str(block.page), "exec"), names)


def test_the_tests_see_a_block_that_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- run first:\nx = 1\n-->\n```python\nassert x == 2\n```\n\n"
        "<!-- not run: for a reason -->\n```sh\nfalse\n```\n\n    ktk demo\n"
    )
    first, second = blocks(page)
    assert (first.line, first.first, second.reason) == (5, "x = 1", "for a reason")
    with pytest.raises(AssertionError):
        run_python(first, {})
    assert indented_commands(page) == ["ktk demo"]


def test_python_of_the_shell_is_this_one(workplace: Path) -> None:
    found = shutil.which("python")
    assert found is not None
    assert os.path.dirname(found) == os.path.dirname(sys.executable)
