"""Command line of ktk: one module per command, imported when the command is used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="ktk",
    help="CPU kernels for the routed experts of Mixture-of-Experts models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"ktk {version('ktk')}")
        raise typer.Exit


@app.callback()
def ktk(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """CPU kernels for the routed experts of Mixture-of-Experts models."""


@app.command()
def backends(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show the installed backends, what would run on this CPU, and why the rest would not."""
    from ktk.cli.report import show_backends

    show_backends(as_json=json)


@app.command()
def demo(
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder or GGUF file of a model of your own; a small one is made without it."
        ),
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Layer of it; default: the first one that has experts.")
    ] = None,
    backend: Annotated[
        list[str] | None, typer.Option(help="Only this backend; may be given several times.")
    ] = None,
) -> None:
    """Run the experts of a checkpoint through every backend: how accurate, how fast."""
    from ktk.demo import run_demo

    run_demo(checkpoint=checkpoint, layer=layer, names=backend or None)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure layers of named shapes against the limits of this machine; see ktk bench --help."""
    from ktk.bench.cli import app as bench_app

    bench_app(args=context.args, prog_name="ktk bench")
