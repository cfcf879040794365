"""Prints what the demo measured."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk.bench.limits import Limits
from ktk.bench.verdict import HIGHEST_FRACTION
from ktk.demo.measure import Measured, Timing
from ktk.terminal import plain_table

# What the whole table takes.
_WIDTH = 78


def print_report(
    console: Console, rows: list[Measured], notes: list[str], limits: Limits, next_step: str
) -> None:
    """Print the table, why some are missing, how to read it, and what to do next."""
    narrow = console.width < _WIDTH
    console.print(_narrow_table(rows, limits) if narrow else _table(rows, limits))
    for note in notes:
        # For a pipe a line is one, on a terminal it breaks between words.
        whole = not console.is_terminal
        console.print(f"[yellow]not run:[/] {escape(note)}", highlight=False, soft_wrap=whole)
    read = limits.read_bytes_per_s / 1e9
    legend = (
        "error: against float64, relative, bfloat16 in and out. of limit: the time this machine "
        f"needs to read the experts' weights once ({read:.1f} GB/s, measured with {limits.threads} "
        "threads) or to multiply, whichever is longer, over the time taken."
    )
    for how in dict.fromkeys(row.decoded for row in rows if row.decoded):
        names = dict.fromkeys(row.backend for row in rows if row.decoded == how)
        legend += f" {', '.join(names)}: {how}."
    if any(_fraction(row.decode, limits) is None for row in rows):
        legend += " -: faster than that, so weights came from a cache."
    console.print(legend, highlight=False, style="dim")
    console.print(f"[bold]Next:[/] {escape(next_step)}", highlight=False, soft_wrap=True)


def print_json(
    checkpoint: str, layer: int, rows: list[Measured], not_run: dict[str, list[str]], limits: Limits
) -> None:
    """Print all of that as JSON; times in seconds, rates per second."""
    document = {
        "checkpoint": checkpoint,
        "layer": layer,
        "limits": asdict(limits),
        "measured": [
            asdict(row)
            | {
                which: asdict(timing) | {"fraction": _fraction(timing, limits)}
                for which, timing in (("decode", row.decode), ("prefill", row.prefill))
            }
            for row in rows
        ],
        "not_run": [{"what": what, "reason": reason} for reason, what in not_run.items()],
    }
    print(json.dumps(document, indent=2))


def _narrow_table(rows: list[Measured], limits: Limits) -> Table:
    """Leave out sizes and times of loading, and give names of backends a line of their own."""
    table = plain_table()
    table.add_column("", no_wrap=True)
    for heading in ("error", *_timing_headings(rows)[::2]):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        if row.backend != before:
            table.add_row(f"[bold]{row.backend}[/]")
        times = (_cells(timing, limits)[0] for timing in (row.decode, row.prefill))
        table.add_row(row.variant, f"{row.error:.4f}", *times)
        before = row.backend
    return table


def _table(rows: list[Measured], limits: Limits) -> Table:
    table = plain_table()
    for heading in ("backend", "variant"):
        table.add_column(heading, no_wrap=True)
    for heading in ("packed\nMB", "load\ns", "error", *_timing_headings(rows)):
        table.add_column(heading, justify="right", no_wrap=True)
    before = ""
    for row in rows:
        table.add_row(
            row.backend if row.backend != before else "",
            row.variant,
            f"{row.nbytes / 1e6:.0f}",
            f"{row.load_seconds:.2f}",
            f"{row.error:.4f}",
            *_cells(row.decode, limits),
            *_cells(row.prefill, limits),
        )
        before = row.backend
    return table


def _timing_headings(rows: list[Measured]) -> list[str]:
    if not rows:
        return []
    return [
        f"decode\nT={rows[0].decode.tokens}\nms",
        "of\nlimit",
        f"prefill\nT={rows[0].prefill.tokens}\nms",
        "of\nlimit",
    ]


def _cells(timing: Timing, limits: Limits) -> tuple[str, str]:
    fraction = _fraction(timing, limits)
    return f"{timing.seconds * 1e3:.2f}", "-" if fraction is None else f"{fraction:.0%}"


def _fraction(timing: Timing, limits: Limits) -> float | None:
    fraction = timing.fraction(limits)
    return fraction if fraction <= HIGHEST_FRACTION else None
