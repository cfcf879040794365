"""`ktk model`: what models are here, what each needs, and whether its files are whole."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show and check the models that are on this machine.",
)

_NAME = typer.Argument(metavar="MODEL", help="Folder, GGUF file, or a name of ktk model list.")


@app.command("list")
def list_models(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List models, with backend and memory of each.

    Those in the hub's cache and in the folders of ktk config models; also names files that are
    missing or cut off. Reads headers only: ktk model verify reads everything.
    """
    from ktk.cli.shelf import show_list

    show_list(as_json=json)


@app.command()
def info(
    name: Annotated[str, _NAME],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say all about one model.

    Where its files are, and what each backend would take. Reads headers only. The exit status is 1
    if files are missing or damaged.
    """
    from ktk.cli.shelf import show_info

    if not show_info(name, as_json=json):
        raise typer.Exit(1)


@app.command()
def verify(
    name: Annotated[str, _NAME],
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Read all files of a model, and name what is wrong.

    Files in the hub's cache are compared with their checksums. Then all experts are read as by ktk
    verify. The exit status is 1 if something is wrong.
    """
    from ktk.cli.shelf import show_verify

    if not show_verify(name, as_json=json):
        raise typer.Exit(1)
