"""Ctrl-C while a reply is being made."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any


class Leave(KeyboardInterrupt):
    """The user pressed Ctrl-C again before a reply had ended."""


class Interrupt:
    """A context manager that lets Ctrl-C end a reply instead of the program.

    The first Ctrl-C sets `asked`, for the reply to end behind its next token. Before the first
    token, which may take minutes, it raises KeyboardInterrupt. The second raises `Leave`.

    Parameters
    ----------
    has_begun : function
        Returns whether there is a token.
    """

    def __init__(self, has_begun: Callable[[], bool]) -> None:
        self.asked = False
        self._has_begun = has_begun
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise Leave
        self.asked = True
        if not self._has_begun():
            raise KeyboardInterrupt
