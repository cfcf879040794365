"""`ktk doctor`: what this machine offers to ktk, what is in the way, and what to do about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk.cli.health import frequency, isa, memory, processors, software
from ktk.cli.health.finding import NOTE, OK, PROBLEM, WARNING, Finding, in_the_way
from ktk.cli.health.machine import Machine

_MARKS = {
    OK: "[green]ok[/]     ",
    NOTE: "[cyan]note[/]   ",
    WARNING: "[yellow]warning[/]",
    PROBLEM: "[red]problem[/]",
}

Check = Callable[[Machine], Iterator[Finding]]

#: What binds: each of these looks at files below the machine's root only.
RESOURCES: tuple[Check, ...] = (
    isa.amx,
    isa.avx512,
    processors.workers,
    processors.mask,
    processors.threads,
    processors.others,
    frequency.frequency,
    memory.numa,
    memory.memory,
    memory.swap,
    memory.pages,
)
CHECKS: tuple[Check, ...] = (
    isa.cpu,
    isa.prefetch,
    *RESOURCES,
    software.gpu,
    software.packages,
    software.backends,
    isa.kernels,
)


def examine(
    machine: Machine | None = None, checks: tuple[Check, ...] | None = None
) -> list[Finding]:
    """Look at everything. Nothing here raises: what cannot be looked at is a finding.

    Parameters
    ----------
    machine
        By default this one.
    checks
        By default all.
    """
    machine = machine or Machine()
    checks = CHECKS if checks is None else checks
    return [finding for check in checks for finding in _guarded(check, machine)]


def _guarded(check: Check, machine: Machine) -> Iterator[Finding]:
    try:
        yield from check(machine)
    except Exception as error:
        text = f"{check.__name__} fails: {type(error).__name__}: {error}"
        yield Finding("ktk", PROBLEM, text, "report this as a bug of ktk")


def show(findings: list[Finding], *, as_json: bool) -> bool:
    """Print findings, and which resources bind; returns whether there is no problem among them."""
    well = all(finding.state != PROBLEM for finding in findings)
    way = in_the_way(findings)
    if as_json:
        entries = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": well, "in_the_way": way, "findings": entries}, indent=2))
        return well
    # For a pipe a finding is a line, on a terminal it breaks between words.
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_table(findings))
        console.print(_summary(way))
        return well
    console.soft_wrap = True
    for finding in findings:
        console.print(f"{_MARKS[finding.state]}  {_sentence(finding)}")
        if finding.advice:
            console.print(f"         [dim]-> {escape(finding.advice)}[/]")
    console.print(_summary(way))
    return well


def _sentence(finding: Finding) -> str:
    evidence = f" ({finding.evidence})" if finding.evidence else ""
    return escape(f"{finding.subject}: {finding.text}{evidence}")


def _summary(way: list[str]) -> str:
    if way:
        return f"in the way: {', '.join(way)}"
    return "in the way: nothing of all this; ktk bench says which share of the limit is reached"


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for finding in findings:
        text = _sentence(finding)
        text += f"\n[dim]-> {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(_MARKS[finding.state], text)
    return table
