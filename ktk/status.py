"""Exit statuses of ktk's commands, and the one line of an error that ktk foresaw.

0 fine, 1 a fault, 2 a wrong command line, 130 interrupted; 141 where nobody reads the output any
more, as of a program that SIGPIPE ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

INTERRUPTED, UNREAD = 130, 141
# Errors of ktk are RuntimeErrors.
_FORESEEN = (RuntimeError, ValueError, OSError, MemoryError, ImportError)


def status_of(run: Callable[[], object]) -> int:
    """Run a command, print the error that it ends with, and return its status.

    An interruption and a broken pipe go on to the caller, as do errors that nobody foresaw.
    """
    try:
        run()
    except SystemExit as stop:
        # typer and rich make it of a broken pipe as well.
        if isinstance(stop.__context__, BrokenPipeError):
            return UNREAD
        return stop.code if isinstance(stop.code, int) else _fault(stop.code)
    except BrokenPipeError:
        raise
    except _FORESEEN as error:
        _fault(error)
        # A command may say what an interruption left behind.
        return INTERRUPTED if isinstance(error.__context__, KeyboardInterrupt) else 1
    return 0


def _fault(error: BaseException | str | None) -> int:
    if error is not None:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"ktk: {text}", file=sys.stderr)
    return int(error is not None)
