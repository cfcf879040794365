"""How several commands print."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


def plain_table(title: str | None = None) -> Table:
    """Make a table without lines between columns: readable in a terminal of 40 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    return Table(title=title, box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


@contextmanager
def doing(step: str = "") -> Iterator[Callable[[str], None]]:
    """Show on stderr what is going on; yield what is to be called with the next step.

    On a terminal the step stands beside a spinner and is gone afterwards; otherwise it is a line.
    """
    from rich.console import Console
    from rich.markup import escape

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(escape(step)) as status:
            yield lambda text: status.update(escape(text))
        return

    def line(step: str) -> None:
        print(step, file=sys.stderr, flush=True)

    if step:
        line(step)
    yield line
