"""Options of the commands that read a checkpoint."""

from __future__ import annotations

import typer

MODULE = typer.Option(
    metavar="NAME",
    help="The module that has the experts, where several do, such as talker; default: the language "
    "model.",
)
ACTIVATION = typer.Option(
    metavar="FUNCTION",
    help="The activation function of the experts, where ktk does not know it: of GGUF files whose "
    "architecture is new.",
)
TOP_K = typer.Option(min=1, help="Experts of a token, where a GGUF file does not say it.")
