"""Source files that pages name are in the tree."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from blocks import ROOT

FOLDERS = ("backends", "docs", "examples", "ktk", "native", "tests", "tools")
#: What is no file of ktk, and whose it is.
OTHERS = {"ggml-common.h": "ik_llama.cpp", "quants.py": "the gguf package"}
_CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
# Placeholders, as in native/probe/<name>.cc and test_*.py, are no names.
_NAME = re.compile(r"(?<![\w./<>{}*-])[\w./-]+\.(?:h|cc|py)(?![\w./<>{}*-])")


@cache
def tree() -> frozenset[str]:
    """Return all files, and each without its first folders: a page may leave them out."""
    paths = [
        path.relative_to(ROOT).parts for name in FOLDERS for path in (ROOT / name).rglob("*.*")
    ]
    return frozenset("/".join(parts[i:]) for parts in paths for i in range(len(parts)))


def pages() -> list[Path]:
    """Return all pages but the one that tells of the past."""
    found = [
        *ROOT.glob("*.md"),
        *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md")),
    ]
    return sorted(page for page in found if page.name != "CHANGELOG.md")


def named(text: str) -> set[str]:
    """Return the source files in backticks, outside of blocks of code."""
    spans = re.findall(r"`([^`]+)`", _CODE.sub("", text))
    return {name for span in spans for name in _NAME.findall(span)}


def unknown(page: Path, text: str) -> list[str]:
    names = named(text) - OTHERS.keys() - tree()
    return sorted(name for name in names if not (page.parent / name).exists())


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert unknown(page, page.read_text()) == []


def test_names_of_others_are_needed() -> None:
    everything = {name for page in pages() for name in named(page.read_text())}
    assert OTHERS.keys() <= everything - tree()


def test_a_file_that_is_gone_is_told() -> None:
    text = (
        "`loops.h`, `gemm/driver.h`, `backends/library_module.h` and `../codec/int8/act.h`; "
        "`native/probe/<name>.cc`, `test_*.py` and `#include <gone.h>`\n```sh\ncat `gone.py`\n```\n"
    )
    page = ROOT / "backends/bf16/README.md"
    assert unknown(page, text) == ["backends/library_module.h", "loops.h"]
