"""`ktk backends`: what is installed, what would run here, and why the rest would not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk import _core
from ktk.backend import BackendInfo
from ktk.errors import BackendError
from ktk.names import ALIASES
from ktk.registry import (
    aliases,
    check_runnable,
    find_backend,
    open_backend,
    providers,
)
from ktk.terminal import plain_table


@dataclass(frozen=True)
class VariantReport:
    """One variant of a backend; `reason` is why it cannot run here."""

    name: str
    required_isa: list[str]
    runnable: bool
    default: bool
    reason: str | None


@dataclass(frozen=True)
class BackendReport:
    """One provider of a backend; `runs` is the variant that would run here.

    `error` is all there is to say about why none would, `brief` the same in some ten words, and
    `advice` what helps; all None for one that runs. `library` is `Backend.library`, and `stored`
    what it keeps weights as.
    """

    name: str
    distribution: str
    version: str
    built: bool
    rivals: tuple[str, ...]
    runs: str | None
    error: str | None
    error_kind: str | None
    brief: str | None
    advice: str | None
    library: dict[str, str] | None
    stored: list[str]
    variants: list[VariantReport]


def report(info: BackendInfo) -> BackendReport:
    """Load one provider and say what it can do here. A broken one is reported, not raised."""
    error: BackendError | None = None
    library: dict[str, str] | None = None
    stored: list[str] = []
    variants: list[VariantReport] = []
    try:
        backend = open_backend(info)
        library = backend.library
        stored = [str(fmt) for fmt in backend.formats]
        variants = _variants(info)
        check_runnable(backend)
    except BackendError as caught:
        error = caught
    return BackendReport(
        name=info.name,
        distribution=info.distribution,
        version=info.version,
        built=info.built,
        rivals=info.rivals,
        runs=next((variant.name for variant in variants if variant.default), None),
        error=str(error) if error else None,
        error_kind=type(error).__name__ if error else None,
        brief=error.brief if error else None,
        advice=error.advice or None if error else None,
        library=library,
        stored=stored,
        variants=variants,
    )


def show_backends(name: str | None = None, *, as_json: bool) -> None:
    """Print all providers in a line each, or all there is to say about the backend of a name."""
    infos = providers() if name is None else [find_backend(name)]
    reports = [report(info) for info in infos]
    if as_json:
        typer.echo(json.dumps(_document(reports), indent=2))
        return
    console = Console(highlight=False)
    if name is not None:
        for line in _details(reports[0]):
            console.print(line, soft_wrap=not console.is_terminal)
        return
    console.print(_table(reports))
    for alias, backend in aliases().items():
        console.print(f"{alias} means {backend}: {ALIASES[alias].meaning}")
    console.print(f"CPU: {_core.cpu_model()} ({', '.join(_core.detected_isa())})")
    if set(_core.allowed_isa()) != set(_core.detected_isa()):
        allowed = ", ".join(_core.allowed_isa())
        console.print(f"KTK_ISA and KTK_ISA_FORCE make ktk use: {allowed}")
    console.print("ktk backends NAME says all about one of them.", style="dim")


def _variants(info: BackendInfo) -> list[VariantReport]:
    backend = open_backend(info)
    variants = backend.variants
    runs_here = any(variant.runnable for variant in variants)
    default = backend.core.default_variant() if runs_here else None
    return [
        VariantReport(
            name=variant.name,
            required_isa=list(variant.required_isa),
            runnable=variant.runnable,
            default=variant.name == default,
            reason=None if variant.runnable else f"no {', '.join(variant.missing_isa)}",
        )
        for variant in variants
    ]


def _document(reports: list[BackendReport]) -> dict[str, Any]:
    return {
        "cpu": _core.cpu_model(),
        "detected_isa": list(_core.detected_isa()),
        "allowed_isa": list(_core.allowed_isa()),
        "backends": [asdict(entry) for entry in reports],
        "aliases": [
            {
                "name": name,
                "backend": backend,
                "meaning": ALIASES[name].meaning,
                "format": str(ALIASES[name].format) if ALIASES[name].format else None,
            }
            for name, backend in aliases().items()
        ],
    }


def _table(reports: list[BackendReport]) -> Table:
    table = plain_table()
    table.add_column("backend", no_wrap=True)
    table.add_column("on this CPU", overflow="fold")
    for entry in reports:
        table.add_row(entry.name, "\n".join(_summary(entry)))
    return table


def _summary(entry: BackendReport) -> Iterator[str]:
    """Say in one line what runs, or why nothing does; more only about what is not of ktk."""
    if entry.distribution != "ktk":
        yield f"of {escape(entry.distribution)} {escape(entry.version)}"
    if entry.runs is None:
        yield f"[yellow]{escape(entry.brief or '')}[/]"
    else:
        others = [one.name for one in entry.variants if one.runnable and not one.default]
        missing = [one.name for one in entry.variants if not one.runnable]
        line = f"[green]{entry.runs}[/]"
        line += f"; or {', '.join(others)}" if others else ""
        yield line + (f"[dim]; not {', '.join(missing)}[/]" if missing else "")
    if entry.rivals:
        yield f"[yellow]also provided by {', '.join(entry.rivals)}: pass distribution=[/]"


def _details(entry: BackendReport) -> Iterator[str]:
    """Say everything about one backend."""
    yield f"[bold]{entry.name}[/] of {escape(entry.distribution)} {escape(entry.version)}"
    if entry.error:
        yield f"[yellow]{entry.error_kind}[/]: {escape(entry.error)}"
    if entry.advice:
        yield f"-> {escape(entry.advice)}"
    for variant in entry.variants:
        yield f"variant {variant.name}: {_state(variant)}"
    for word, text in (entry.library or {}).items():
        yield f"{escape(word)}: {escape(text)}"
    for stored in entry.stored:
        yield f"stores {escape(stored)}"
    names = [name for name, backend in aliases().items() if backend == entry.name]
    if names:
        yield f"other names: {', '.join(names)}"


def _state(variant: VariantReport) -> str:
    if variant.default:
        return "[green]runs[/]"
    return "can run" if variant.runnable else f"[dim]{variant.reason}[/]"
