"""`ktk version`: what a report of a fault should say first."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import typer

from ktk import _core
from ktk.errors import BackendError
from ktk.registry import backends, load_backend


def facts() -> dict[str, Any]:
    """Return versions by name, and the variant that each backend would run; None where none."""
    return {
        "ktk": version("ktk"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _core.cpu_model(),
        "torch": package_version("torch"),
        "numpy": package_version("numpy"),
        "backends": {name: _variant(name) for name in backends()},
    }


def show(*, as_json: bool) -> None:
    """Print the facts, as JSON or in a few lines."""
    found = facts()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    by_variant: dict[str | None, list[str]] = {}
    for name, variant in found["backends"].items():
        by_variant.setdefault(variant, []).append(name)
    typer.echo(f"ktk {found['ktk']}")
    typer.echo(f"Python {found['python']} on {found['platform']}")
    typer.echo(f"torch {found['torch'] or 'none'}, numpy {found['numpy'] or 'none'}")
    typer.echo(f"CPU: {found['cpu']}")
    for variant, names in by_variant.items():
        typer.echo(f"{variant or 'not here'}: {', '.join(names)}")


def package_version(name: str) -> str | None:
    """Return the version of an installed package without importing it."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _variant(name: str) -> str | None:
    try:
        backend = load_backend(name)
    except BackendError:
        return None
    return backend.core.default_variant()
