"""docs/checkpoints.md has the tables that ktk reads checkpoints by, as they are now."""

from __future__ import annotations

import importlib.util
import platform
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parents[2] / "tools/checkpoint_tables.py"
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="only x86-64 has all the backends that the page lists"
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("checkpoint_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    assert tool.written(page, tool.tables()) == page, "python tools/checkpoint_tables.py"


def test_every_row_of_the_tables_is_there(tool: ModuleType) -> None:
    page = tool.PAGE.read_text()
    assert all(f"| {family.models} |" in page for family in tool.FAMILIES)
    assert all(f"| {scheme.found} |" in page for scheme in tool.SCHEMES)


def test_another_row_makes_another_page(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "FAMILIES", tool.FAMILIES[1:])
    page = tool.PAGE.read_text()
    assert tool.written(page, tool.tables()) != page


def test_formats_are_those_that_decoding_gives(tool: ModuleType) -> None:
    [gptq] = [scheme for scheme in tool.SCHEMES if scheme.found.startswith("GPTQ")]
    labels = {tool.label(fmt) for fmt in tool.formats_of(gptq)}
    assert {"u4-f16-g128", "u4-f16-zero-u8-g128", "u4-bf16-g32"} <= labels
    known = tool.installed()
    assert tool.takers(tool.Format("u4", "f16", "u8", 1, 128), known) == ("AMXINT4",)
    assert tool.takers(tool.Format("bf16"), known) == ("BF16", "BF16Z")
    assert tool.takers(tool.Format("u4", "f32", "u8", 1, 128), known) == ()


def test_a_missing_place_is_an_error(tool: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no place for the table families"):
        tool.written("", tool.tables())
