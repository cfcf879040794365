"""`ktk backends`: what is installed, what would run here, and why the rest would not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from ktk import _core
from ktk.aliases import ALIASES
from ktk.errors import BackendError
from ktk.registry import BackendInfo, aliases, open_backend, providers


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
    """One provider of a backend; `error` is why it does not load, `runs` what would run here.

    `library` is `Backend.library`.
    """

    name: str
    distribution: str
    version: str
    built: bool
    rivals: tuple[str, ...]
    runs: str | None
    error: str | None
    error_kind: str | None
    library: dict[str, str] | None
    variants: list[VariantReport]


def report(info: BackendInfo) -> BackendReport:
    """Load one provider and say what it can do here. A broken one is reported, not raised."""
    error: BackendError | None = None
    library: dict[str, str] | None = None
    variants: list[VariantReport] = []
    try:
        library = open_backend(info).library
        variants = _variants(info)
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
        library=library,
        variants=variants,
    )


def show_backends(*, as_json: bool) -> None:
    """Print all providers, as JSON or as a table."""
    reports = [report(info) for info in providers()]
    if as_json:
        typer.echo(json.dumps(_document(reports), indent=2))
        return
    console = Console()
    console.print(_table(reports))
    for name, backend in aliases().items():
        console.print(f"{name} means {backend}: {ALIASES[name].meaning}", highlight=False)
    console.print(f"CPU: {_core.cpu_model()} ({', '.join(_core.detected_isa())})", highlight=False)
    if set(_core.allowed_isa()) != set(_core.detected_isa()):
        allowed = ", ".join(_core.allowed_isa())
        console.print(f"KTK_ISA makes ktk use: {allowed}", highlight=False)


def _variants(info: BackendInfo) -> list[VariantReport]:
    variants = open_backend(info).variants
    # Best first, so the first that can run is the one that does.
    default = next((variant.name for variant in variants if variant.runnable), None)
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
    table = Table(title="ktk backends")
    for heading in ("backend", "distribution", "variant", "on this CPU"):
        table.add_column(heading, overflow="fold")
    for entry in reports:
        origin = f"{entry.distribution} {entry.version}"
        if entry.error:
            why = f"[red]{entry.error_kind}[/]: {_text(entry.error)}"
            table.add_row(entry.name, origin, "", why)
        for row, variant in enumerate(entry.variants):
            first = row == 0
            table.add_row(
                entry.name if first else "", origin if first else "", variant.name, _state(variant)
            )
        for word, text in (entry.library or {}).items():
            table.add_row("", "", word, _text(text))
        if entry.rivals:
            others = ", ".join(entry.rivals)
            table.add_row("", "", "", f"[yellow]also provided by {others}: pass distribution=[/]")
        table.add_section()
    return table


def _state(variant: VariantReport) -> str:
    if variant.default:
        return "[green]runs[/]"
    return "can run" if variant.runnable else f"[dim]{variant.reason}[/]"


def _text(message: str) -> str:
    """Keep rich from reading brackets of a message as its markup."""
    return message.replace("[", r"\[")
