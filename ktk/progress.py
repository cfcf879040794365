"""Shows how far long work is: a bar on a terminal, elsewhere a line for each step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from ktk.closing import Closing
from ktk.sizes import duration, gigabytes

# Seconds after which a step that goes on has a line of its own.
EVERY = 10.0
# Bytes after which a rate says something.
_ENOUGH = 64e6


class Progress(Closing):
    """Work on bytes, in named steps such as layers; a context manager.

    Parameters
    ----------
    total : int
        Bytes of the whole work. The attribute may be changed while it goes on.
    shown : bool, optional
        Whether to show anything. By default only on a terminal.
    stream : text stream, optional
        By default stderr; where that is closed, nothing is shown.
    clock : function, optional
        Seconds, from any beginning.
    """

    def __init__(
        self,
        total: int,
        *,
        shown: bool | None = None,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total = total
        self._stream = stream or sys.stderr
        terminal = self._stream is not None and self._stream.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._lines = self._stream is not None and not terminal and bool(shown)
        self._wants_bar = terminal and shown is not False
        self._clock = clock
        self._begin = self._last = clock()
        self._done = 0.0
        self._step = ""

    def __enter__(self) -> Progress:
        if self._wants_bar:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(file=self._stream),
            )
            self._task = self._bar.add_task("", total=self.total)
            self._bar.start()
        return self

    def close(self) -> None:
        """End the bar, which stays, or print the last line."""
        if self._bar is not None:
            self._bar.stop()
        elif self._step:
            self._print()

    def advance(self, nbytes: float, step: str) -> None:
        """Say that some bytes are done, and what they belong to."""
        if self._bar is not None:
            self._bar.update(self._task, advance=nbytes, total=self.total, description=step)
            return
        if self._step not in ("", step):
            self._print()
        self._step = step
        self._done += nbytes
        if self._clock() - self._last >= EVERY:
            self._print()

    def _print(self) -> None:
        self._last = self._clock()
        if not self._lines:
            return
        seconds = max(self._last - self._begin, 1e-9)
        rate = self._done / seconds
        # From a few small tensors nobody can tell how long all will take.
        is_told = self._done >= min(_ENOUGH, self.total / 100)
        left = max(self.total - self._done, 0) / rate if is_told and rate else None
        share = 100 * self._done / self.total if self.total else 100
        print(
            f"{self._step}: {gigabytes(self._done)} of {gigabytes(self.total)}, {share:.0f}%, "
            f"{gigabytes(rate)}/s" + (f", {duration(left)} left" if left is not None else ""),
            file=self._stream,
            flush=True,
        )
