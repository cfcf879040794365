"""`ktk convert`: says what it is going to do, does it, and shows how far it is."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ktk.checkpoint.route import summaries
from ktk.checkpoint.spans import spans
from ktk.errors import CheckpointError
from ktk.packed.convert import Conversion
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
) -> None:
    """Convert, with words and a progress bar on stderr; parameters as of `Conversion`."""
    console = Console(stderr=True, highlight=False)
    conversion = Conversion(
        source,
        output,
        backend=backend,
        group_size=group_size,
        layers=layers,
        resume=resume,
        threads=threads,
    )
    begin = time.monotonic()
    if resume:
        console.print(f"looking at what {output} holds already")
    try:
        with conversion:
            _announce(console, conversion)
            _run(console, conversion)
    except KeyboardInterrupt:
        raise CheckpointError(
            f"stopped; the layers that {output} has by now are complete, and --resume goes on"
        ) from None
    seconds = time.monotonic() - begin
    total = gigabytes(sum(plan.nbytes for plan in conversion.plans))
    console.print(f"{output}: {total} in {len(conversion.plans)} layers, after {seconds:.0f} s")


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


def _run(console: Console, conversion: Conversion) -> None:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task("experts", total=sum(plan.nbytes for plan in conversion.todo))
        for plan in conversion.run():
            experts = plan.encoder.layout.config.num_experts
            bar.update(
                task, advance=plan.nbytes / experts, description=f"layer {plan.encoder.number}"
            )
