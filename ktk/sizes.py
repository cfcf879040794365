"""What several commands print, and how."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def size_text(nbytes: int) -> str:
    """Write bytes of memory: 2.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


@contextmanager
def doing(step: str = "") -> Iterator[Callable[[str], None]]:
    """Show on stderr what is going on; yield what is to be called with the next step.

    On a terminal the step stands beside a spinner and is gone afterwards; otherwise it is a line.
    """
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(step) as status:
            yield status.update
        return

    def line(step: str) -> None:
        print(step, file=sys.stderr, flush=True)

    if step:
        line(step)
    yield line


def gigabytes(nbytes: float) -> str:
    """Write bytes of files: 2.7 GB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Write a time: 12 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
