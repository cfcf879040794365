"""The pages lead somewhere, and the code of docs/python.md runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SIZES = "E, top_k, H, I = 64, 8, 2048, 768"


def prose(page: Path) -> str:
    """Return a page without its code, in which brackets are no links."""
    return re.sub(r"^```.*?^```$|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    targets = [one for one in _LINK.findall(prose(page)) if "://" not in one]
    assert [one for one in targets if not (page.parent / one).exists()] == []


def test_the_readme_leads_to_every_page() -> None:
    named = {(ROOT / one).resolve() for one in _LINK.findall((ROOT / "README.md").read_text())}
    assert set((ROOT / "docs").resolve().glob("*.md")) <= named


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = _CODE.findall((ROOT / "docs/python.md").read_text())
    code = "\n".join(blocks)
    assert len(blocks) >= 4
    assert _SIZES in code
    # Smaller, for the sake of time.
    code = code.replace(_SIZES, "E, top_k, H, I = 6, 2, 256, 128")
    there = {"experts_on_gpu": torch.tensor([True] + 5 * [False])}
    exec(compile(code, "docs/python.md", "exec"), there)
    assert there["y"].shape == (5, 256)
