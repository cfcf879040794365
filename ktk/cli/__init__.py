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
        version()
        raise typer.Exit


@app.callback()
def ktk(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """CPU kernels for the routed experts of Mixture-of-Experts models."""


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version

    typer.echo(f"ktk {version('ktk')}")


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Look at CPU, memory, limits, drivers and backends: what is in the way, and what helps.

    The exit status is 1 if there is a problem.
    """
    from ktk.cli.health import show

    if not show(as_json=json):
        raise typer.Exit(1)


@app.command()
def inspect(
    path: Annotated[
        Path, typer.Argument(help="Folder of safetensors or packed files, or a GGUF file.")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show what a checkpoint holds, layer by layer, and the memory that each backend would take.

    The exit status is 1 if a layer is incomplete or damaged.
    """
    from ktk.cli.contents import show

    if not show(path, as_json=json):
        raise typer.Exit(1)


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


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="Folder or GGUF file of a model.")
    ],
    output: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    backend: Annotated[str, typer.Option(help="What the weights are for; see ktk backends.")],
    group_size: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Columns that share a scale, 0 for whole rows; default: those of the source, or "
            "what the backend likes best.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers such as 0-3,5; default: all that have experts."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep the layers that an earlier run finished, if their checksums are right.",
        ),
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="Experts that are encoded at a time; default: one per CPU."),
    ] = None,
) -> None:
    """Write the experts of a model as a backend stores them, to be loaded often."""
    from ktk.cli.convert import parse_layers, run_convert

    try:
        wanted = None if layers is None else parse_layers(layers)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--layers") from None
    run_convert(
        source,
        output,
        backend=backend,
        group_size=group_size,
        layers=wanted,
        resume=resume,
        threads=threads,
    )


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure layers of named shapes against the limits of this machine; see ktk bench --help."""
    from ktk.bench.cli import app as bench_app

    bench_app(args=context.args, prog_name="ktk bench")
