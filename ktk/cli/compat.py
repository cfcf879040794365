"""`ktk compat`: programs that were written for kt-kernel, with ktk in its place."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(rich_markup_mode=None, invoke_without_command=True, no_args_is_help=True)


@app.callback()
def compat(
    context: typer.Context,
    path: Annotated[
        bool,
        typer.Option("--path", help="Print the folder to put in front of PYTHONPATH."),
    ] = False,
    wheel: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write a wheel of the name kt-kernel into DIR, for environments without kt-kernel "
            "whose programs require it, and print its path.",
        ),
    ] = None,
) -> None:
    """Run programs of kt-kernel with ktk in its place.

    Their import of kt_kernel gives ktk. An installed kt-kernel stays as it is, and so do other
    packages of its wheel, such as GPU kernels.
    """
    from ktk.cli.version import package_version
    from ktk.compat import folder
    from ktk.compat.wheel import write_wheel

    if path + (wheel is not None) + (context.invoked_subcommand is not None) > 1:
        raise typer.BadParameter("only one of --path, --wheel and a command can be meant")
    if path:
        typer.echo(folder())
    if wheel is not None:
        if wheel.exists() and not wheel.is_dir():
            raise typer.BadParameter(f"{wheel} is no folder", param_hint="--wheel")
        typer.echo(write_wheel(wheel))
        there = package_version("kt-kernel")
        if there is not None and "+ktk." not in there:
            typer.echo(
                f"ktk: kt-kernel {there} is installed here, and installing this wheel would remove "
                "it, with the GPU kernels that sglang-kt takes from it: ktk compat run keeps both",
                err=True,
            )


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    no_args_is_help=True,
)
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="COMMAND", help="Arguments of Python, or a program of its own."),
    ],
) -> None:
    """Run one command in which kt_kernel is ktk.

    For example: ktk compat run -m sglang.launch_server --kt-weight-path MODEL ...
    """
    from ktk.compat import environment

    if command[0].startswith("-") or Path(command[0]).suffix == ".py":
        command = [sys.executable, *command]
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(f"there is no program {command[0]} in PATH")
    sys.stdout.flush()
    os.execve(program, command, environment(os.environ))
