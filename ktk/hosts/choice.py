"""When ktk computes layers of an engine: what users say by variables, and what they are told."""

from __future__ import annotations

import enum
import logging
import os


class Mode(enum.Enum):
    """What an engine's variable, such as KTK_VLLM, says: 0, 1, or nothing."""

    NEVER = "0"
    ALWAYS = "1"
    NEEDED = ""


def mode_of(variable: str) -> Mode:
    """Return when ktk is to compute; a backend that is named in KTK_BACKEND asks for it, too.

    Raises
    ------
    ValueError
        The variable has another value.
    """
    value = os.environ.get(variable, "")
    try:
        found = Mode(value)
    except ValueError:
        raise ValueError(f"{variable} must be 0 or 1, got {value!r}") from None
    return Mode.ALWAYS if found is Mode.NEEDED and backend_name() else found


def backend_name() -> str | None:
    """Return the backend that the environment names for experts."""
    return os.environ.get("KTK_BACKEND") or None


class OnceLog:
    """A log in which a line that is the same for all layers stands once.

    Parameters
    ----------
    name : str
        Of the logger: below the engine's own, whose settings it then has.
    """

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(name)
        self.said: set[str] = set()

    def __call__(self, sentence: str) -> None:
        """Log a sentence that was not logged before."""
        if sentence not in self.said:
            self.said.add(sentence)
            self._log.info("%s", sentence)
