"""Pages lead somewhere, the site has all of them, and the README stays one screen."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import PAGES, ROOT

ALL = [
    *PAGES,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CODE_OF_CONDUCT")),
    ROOT / "tests/README.md",
]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """Return a page without its code, in which brackets are no links."""
    return re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def in_toctree(page: Path) -> set[Path]:
    """Return the pages that a page lists, and those that these list."""
    found = set()
    for tree in _TOCTREE.findall(page.read_text()):
        for line in tree.splitlines():
            if line and not line.startswith(":"):
                listed = (page.parent / f"{line}.md").resolve()
                found |= {listed} | in_toctree(listed)
    return found


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    targets = [one for one in _LINK.findall(prose(page)) if "://" not in one]
    assert [one for one in targets if not (page.parent / one).exists()] == []


def test_the_site_has_every_page() -> None:
    index = ROOT / "docs/index.md"
    assert {*ALL, ROOT / "CHANGELOG.md"} - {index} <= in_toctree(index)


def test_the_readme_is_one_screen() -> None:
    """As many lines as a screen of today shows in small letters, none of them cut off."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 145


def test_set_up_commands_are_found_by_tools_fresh() -> None:
    """By the expression that it finds them by."""
    script = (ROOT / "tools/fresh").read_text()
    [expression] = re.findall(r"sed -n '(s/\^.*?/p)' \"\$source/README.md\"", script)
    command = ["sed", "-n", expression, str(ROOT / "README.md")]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    # The second installs nothing of the checkout: ktk is compiled once.
    assert [line.split('"')[1] for line in found] == [".[run]", "ktk[testing]"]
    assert found[0].endswith("&& ktk demo")
    assert found[1].endswith("&& pytest -n auto")


def test_the_chart_has_the_recorded_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    sys.path.insert(0, str(ROOT / "tools/bench"))
    import chart

    shown = re.findall(r"<dc:description>(.*?)</dc:description>", chart.CHART.read_text())
    assert [json.loads(one) for one in shown] == [json.loads(chart.description())]
    chart.draw(tmp_path / "chart.svg")
    assert (tmp_path / "chart.svg").stat().st_size > 10_000
