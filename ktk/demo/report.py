"""Prints what the demo measured."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk.bench.limits import Limits
from ktk.demo.measure import Measured, Timing


def print_report(
    console: Console, rows: list[Measured], notes: list[str], limits: Limits, next_step: str
) -> None:
    """Print the table, why some are missing, how to read it, and what to do next."""
    console.print(_table(rows))
    for note in notes:
        console.print(f"[yellow]not run:[/] {escape(note)}", highlight=False)
    read = limits.read_bytes_per_s / 1e9
    console.print(
        "error: against float64, relative, bfloat16 in and out. of limit: the time this machine "
        f"needs to read the experts' weights once ({read:.1f} GB/s measured with "
        f"{limits.threads} threads) or to multiply, whichever is longer, over the time taken.",
        highlight=False,
        style="dim",
    )
    console.print(f"[bold]Next:[/] {escape(next_step)}", highlight=False, soft_wrap=True)


def _table(rows: list[Measured]) -> Table:
    table = Table()
    for heading in ("backend", "variant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("packed", "load", "error", *_timing_headings(rows)):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if before and row.backend != before:
            table.add_section()
        table.add_row(
            row.backend if row.backend != before else "",
            row.variant,
            f"{row.nbytes / 1e6:.0f} MB",
            f"{row.load_seconds:.2f} s",
            f"{row.error:.4f}",
            *_cells(row.decode),
            *_cells(row.prefill),
        )
        before = row.backend
    return table


def _timing_headings(rows: list[Measured]) -> list[str]:
    if not rows:
        return []
    return [
        f"decode T={rows[0].decode.tokens}",
        "of limit",
        f"prefill T={rows[0].prefill.tokens}",
        "of limit",
    ]


def _cells(timing: Timing) -> tuple[str, str]:
    return f"{timing.seconds * 1e3:.2f} ms", f"{timing.fraction:.0%}"
