"""`ktk convert --to`: says what it is going to do, does it, and shows how far it is."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import typer
from rich.console import Console

from ktk.checkpoint.spans import spans
from ktk.conversion.compressed import CheckpointConversion
from ktk.formats import label
from ktk.progress import Progress
from ktk.sizes import gigabytes


def run_convert_to(
    source: Path,
    output: Path,
    *,
    to: str,
    group_size: int | None = None,
    resume: bool = False,
    threads: int | None = None,
    as_json: bool = False,
) -> None:
    """Convert, with words and progress on stderr; parameters as of `CheckpointConversion`.

    With `as_json` stdout has what was made. Interrupted, it ends with the status 130.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    conversion = CheckpointConversion(
        source,
        output,
        to=to,
        group_size=group_size,
        resume=resume,
        threads=threads,
        on_look=lambda path: console.print(f"{path.name}: looked at", soft_wrap=True),
    )
    begin = time.monotonic()
    if resume:
        console.print(f"looking at what {output} holds already", soft_wrap=True)
    try:
        with conversion:
            _announce(console, conversion)
            with Progress(conversion.expected, shown=True) as progress:
                for shard, nbytes in conversion.run():
                    progress.advance(nbytes, shard.path.name)
    except KeyboardInterrupt:
        console.print(
            f"stopped; the files that {output} has by now are complete, and --resume goes on",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    seconds = time.monotonic() - begin
    total = sum(one.shard.nbytes for one in conversion.files)
    console.print(
        f"{output}: {gigabytes(total)} in {len(conversion.files)} files, after {seconds:.0f} s",
        soft_wrap=True,
    )
    if as_json:
        document = {
            "output": str(output),
            "to": to,
            "format": label(conversion.target.format),
            "seconds": seconds,
            "nbytes": total,
            "layers": conversion.layers,
            "files": [
                {"file": str(one.shard.path), "nbytes": one.shard.nbytes, "kept": one.done}
                for one in conversion.files
            ],
        }
        typer.echo(json.dumps(document, indent=2))


def _announce(console: Console, conversion: CheckpointConversion) -> None:
    """Say what becomes of the experts, and what room that takes."""
    kept = len(conversion.files) - len(conversion.todo)
    if kept:
        console.print(f"{kept} of {len(conversion.files)} files are there already")
    count = conversion.decoded
    rest = f"copied, or decoded where it is codes (matrices: {count})" if count else "copied"
    console.print(
        f"layers {spans(conversion.layers)}: experts are {conversion.stored}, and become "
        f"{conversion.target.format}; all else is {rest}",
        soft_wrap=True,
    )
    if not conversion.todo:
        return
    free = shutil.disk_usage(conversion.output).free
    console.print(f"{gigabytes(conversion.expected)} to write, {gigabytes(free)} free")
