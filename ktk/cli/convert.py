"""`ktk convert`: says what it is going to do, does it, and shows how far it is."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from ktk.checkpoint.spans import spans
from ktk.conversion.convert import Conversion
from ktk.loading.route import summaries
from ktk.progress import Progress
from ktk.sizes import gigabytes

# Models have up to some hundred layers; a slip of the finger must not become a set of 1e12 numbers.
_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_layers(text: str) -> list[int]:
    """Read "0-3,5"; ValueError for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(end or match[1]) for end in match.groups()) if match else (1, 0)
        if first > last:
            raise ValueError(f"{part.strip()!r} is no layer and no range of layers such as 0-3")
        found.update(range(first, last + 1))
    return sorted(found)


def run_convert(
    source: Path,
    output: Path,
    *,
    backend: str,
    group_size: int | None = None,
    layers: Sequence[int] | None = None,
    resume: bool = False,
    threads: int | None = None,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Convert, with words and progress on stderr; parameters, and options, as of `Conversion`.

    With `as_json` stdout has what was made. Interrupted, it ends with the status 130.
    """
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

    def on_look(layer: int) -> None:
        console.print(f"layer {layer}: looked at", soft_wrap=True)

    conversion = Conversion(
        source,
        output,
        backend=backend,
        group_size=group_size,
        layers=layers,
        resume=resume,
        threads=threads,
        on_look=on_look,
        **options,
    )
    begin = time.monotonic()
    if resume:
        console.print(f"looking at what {output} holds already")
    try:
        with conversion:
            _announce(console, conversion)
            with Progress(0, shown=True) as progress:
                for plan in conversion.run():
                    progress.total = conversion.expected
                    experts = plan.encoder.layout.config.num_experts
                    progress.advance(plan.nbytes / experts, f"layer {plan.encoder.number}")
    except KeyboardInterrupt:
        console.print(
            f"stopped; the layers that {output} has by now are complete, and --resume goes on"
        )
        raise typer.Exit(130) from None
    seconds = time.monotonic() - begin
    total = gigabytes(sum(plan.nbytes for plan in conversion.plans))
    console.print(f"{output}: {total} in {len(conversion.plans)} layers, after {seconds:.0f} s")
    if as_json:
        typer.echo(json.dumps(_document(conversion, seconds), indent=2))


def _document(conversion: Conversion, seconds: float) -> dict[str, object]:
    return {
        "output": str(conversion.output),
        "backend": conversion.backend.name,
        "seconds": seconds,
        "nbytes": sum(plan.nbytes for plan in conversion.plans),
        "layers": [
            {
                "number": plan.encoder.number,
                "file": str(plan.path),
                "nbytes": plan.nbytes,
                "kept": plan.done,
                "how": plan.encoder.how,
                "formats": {part: str(fmt) for part, fmt in plan.encoder.layout.formats.items()},
            }
            for plan in conversion.plans
        ],
    }


def _announce(console: Console, conversion: Conversion) -> None:
    """Say what becomes of which layers, and what room that takes."""
    todo = conversion.todo
    kept = [plan.encoder.number for plan in conversion.plans if plan.done]
    if kept:
        console.print(f"layers {spans(kept)} are there already")
    for line, _ in summaries({plan.encoder.number: plan.encoder.route for plan in todo}):
        console.print(line)
    if not todo:
        return
    needed = sum(plan.nbytes for plan in todo)
    free = shutil.disk_usage(conversion.output).free
    console.print(f"{gigabytes(needed)} to write, {gigabytes(free)} free")
