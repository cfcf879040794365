"""`ktk verify`: reads all experts of a checkpoint, and names what is wrong with them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from ktk.checkpoint import Verification, verify
from ktk.checkpoint.spans import spans
from ktk.progress import Progress
from ktk.sizes import gigabytes


def show(path: Path, *, layers: Sequence[int] | None, as_json: bool, **reading: Any) -> bool:
    """Read and print, with a progress bar on stderr; returns whether nothing is wrong.

    Options are those of `open_checkpoint`.
    """
    with Progress(0, shown=True) as progress:

        def on_expert(layer: int, nbytes: int, total: int) -> None:
            progress.total = total
            progress.advance(nbytes, f"layer {layer}")

        result = verify(path, layers=layers, on_expert=on_expert, **reading)
    if as_json:
        typer.echo(json.dumps(document_of(result), indent=2))
    else:
        for line in lines_of(result):
            typer.echo(line)
    return result.sound


def document_of(result: Verification) -> dict[str, object]:
    """Return what `--json` prints."""
    return {**asdict(result), "path": str(result.path), "sound": result.sound}


def lines_of(result: Verification) -> list[str]:
    """Return a line for each fault, and one about all."""
    lines = [
        fault.message if fault.layer is None else f"layer {fault.layer}: {fault.message}"
        for fault in result.faults
    ]
    if result.more:
        lines.append(f"and {result.more} more faults")
    read = "no experts were read"
    if result.layers:
        read = (
            f"{result.experts} experts in layers {spans(list(result.layers))}, "
            f"{gigabytes(result.nbytes)}, were read"
        )
    count = len(result.faults) + result.more
    said = f"{count} fault{'s' * (count != 1)}" if count else "nothing is wrong"
    return [*lines, f"{result.path}: {said}; {read}"]
