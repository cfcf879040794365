"""Prints what the demo measured."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk.bench.limits import Limits
from ktk.demo.measure import Measured, Timing


def print_report(
    console: Console, rows: list[Measured], notes: list[str], limits: Limits, next_step: str
) -> None:
    """Print the table, why some are missing, how to read it, and what to do next."""
    console.print(_table(rows, limits))
    for note in notes:
        console.print(f"[yellow]not run:[/] {escape(note)}", highlight=False, soft_wrap=True)
    read = limits.read_bytes_per_s / 1e9
    legend = (
        "error: against float64, relative, bfloat16 in and out. of limit: the time this machine "
        f"needs to read the experts' weights once ({read:.1f} GB/s, measured with {limits.threads} "
        "threads) or to multiply, whichever is longer, over the time taken."
    )
    names = dict.fromkeys(row.backend for row in rows if row.quantized)
    if names:
        legend += f" {', '.join(names)}: the checkpoint's floats, quantised before loading."
    if any(row.decode.fraction(limits) > 1 for row in rows):
        legend += " Above 100%: weights came from a cache."
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
                which: asdict(timing) | {"fraction": timing.fraction(limits)}
                for which, timing in (("decode", row.decode), ("prefill", row.prefill))
            }
            for row in rows
        ],
        "not_run": [{"what": what, "reason": reason} for reason, what in not_run.items()],
    }
    print(json.dumps(document, indent=2))


def _table(rows: list[Measured], limits: Limits) -> Table:
    # No lines between columns, so that it fits a terminal of 80 columns.
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
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
    return f"{timing.seconds * 1e3:.2f}", f"{timing.fraction(limits):.0%}"
