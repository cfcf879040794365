"""Shows how far loading has come."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from ktk.checkpoint.load import LayerPlan


@contextmanager
def loading(total: int, *, shown: bool | None) -> Iterator[Callable[[LayerPlan], None]]:
    """Yield what is to be called after each expert.

    Parameters
    ----------
    total
        Bytes of all experts in the files.
    shown
        Whether to show a bar on stderr; None: if it is a terminal.
    """
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
        disable=not (sys.stderr.isatty() if shown is None else shown),
    ) as bar:
        task = bar.add_task("loading experts", total=total)

        def advance(plan: LayerPlan) -> None:
            name = f"layer {plan.number} ({plan.backend.name})"
            bar.update(task, advance=plan.expert_nbytes, description=name)

        yield advance
