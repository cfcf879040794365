"""`ktk serve`: starts the server that is installed, with ktk switched on."""

from __future__ import annotations

import os
import shlex
import sys
from typing import Annotated

import typer

from ktk.cli.text import Backend, Head, Linears, Model, Source, Threads


def serve(
    model: Model,
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="Further ones for the server."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="vllm, sglang or transformers; default: the first that can."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    backend: Backend = None,
    linears: Linears = None,
    head: Head = None,
    threads: Threads = None,
    source: Source = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the command and do not run it.")
    ] = False,
) -> None:
    """Serve a model to clients of OpenAI's interface.

    ktk has no server of its own: this prints and runs the command of one that is installed.
    """
    from ktk.pool import set_default_threads
    from ktk.registry import find_backend
    from ktk.serving.engines import Request, choose, served_as
    from ktk.settings import setting
    from ktk.text.load import check_files
    from ktk.text.place import parts_of

    choose(engine)  # without a server, nothing has to be looked for
    rest, experts = parts_of(model, source)
    check_files(rest)
    request = Request(
        model=rest,
        host=host,
        port=port,
        experts=experts,
        backend=setting("backend", backend).value,
        linears=setting("linears", linears).value,
        head=setting("head", head).value,
        threads=setting("threads", threads).value,
        more=tuple(more or ()),
    )
    for name in filter(None, (request.backend, request.linears, request.head)):
        find_backend(name)
    if request.threads is not None:
        set_default_threads(request.threads)  # which refuses what no machine has
    chosen = choose(engine, request)
    if chosen.name == "transformers":
        from ktk.transformers import load_tokenizer

        load_tokenizer(rest)  # which a server would miss when the first client asks
    command, environment = chosen.command(request), chosen.environment(request)
    shown = "python" if command[0] == sys.executable else command[0]
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    typer.echo(" ".join([*variables, shlex.join([shown, *command[1:]])]), err=True)
    name = served_as(request)
    place = f"[{host}]" if ":" in host else host
    typer.echo(f"clients: base_url=http://{place}:{port}/v1, model={name}", err=True)
    if not dry_run:
        sys.stdout.flush()
        os.execvpe(command[0], command, {**os.environ, **environment})
