"""Code blocks of a page in Markdown, and what the page says about running them.

A comment before a block is for the tests; readers do not see it:

    <!-- not run: REASON -->        it is not run, and why
    <!-- needs: COMMAND -->         it is left out where this command is not installed
    <!-- run first:
    CODE
    -->                             code of the block's language that runs before it
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Languages of blocks that run; others are output, configuration, or the site's own.
RUN = ("python", "sh")

_FENCE = re.compile(r"^```(\{?[\w-]*\}?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENTS = re.compile(r"(?:<!--(?:(?!-->).)*-->\s*)+\Z", re.DOTALL)
_COMMENT = re.compile(r"<!--\s*(not run|needs|run first):\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """Code as it stands in a page, with the line of its first character."""

    page: Path
    line: int
    language: str
    code: str
    reason: str = ""
    needs: str = ""
    first: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        said = dict.fromkeys(("not run", "needs", "run first"), "")
        if before := _COMMENTS.search(text, 0, found.start()):
            said |= dict(_COMMENT.findall(before[0]))
        line = text.count("\n", 0, found.start()) + 2
        yield Block(page, line, found[1], found[2], *said.values())


def indented_commands(page: Path) -> list[str]:
    """Return lines of indented blocks that look like commands or code, which nothing would run."""
    text = _FENCE.sub("", page.read_text())
    begins = r"(?:ktk|python|pip|pytest|torchrun|vllm|import|from|[A-Z_]+=\S+) .*"
    return re.findall(rf"^    ({begins})$", text, re.MULTILINE)
