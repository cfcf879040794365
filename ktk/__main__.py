"""The `ktk` command, also as `python -m ktk`.

Its exit status: 0 fine, 1 a fault, 2 a wrong command line, 130 interrupted; 141 where nobody reads
the output any more, as of a program that SIGPIPE ends.
"""

from __future__ import annotations

import os
import sys
import warnings

# Errors of ktk are RuntimeErrors.
_FORESEEN = (RuntimeError, ValueError, OSError, MemoryError, ImportError)
_INTERRUPTED, _UNREAD = 130, 141


def main() -> None:
    """Run the command line; an error that ktk foresaw is one line and not a traceback.

    So is a warning: of a library that will be slow, say.
    """
    _open_closed_streams()
    warnings.formatwarning = lambda message, *_, **__: f"ktk: {' '.join(str(message).split())}\n"
    try:
        status = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:
        status = _UNREAD
    if status == _UNREAD:
        # What is left to write has to go somewhere when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(status)


def _open_closed_streams() -> None:
    """Open the null device where the shell closed a standard stream (`2>&-`).

    Else a file of data would get the stream's number, and with it what libraries print.
    """
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        mode = "r" if name == "stdin" else "w"
        # Its number is the lowest that is free, as the stream's is, and stays open in children.
        fd = os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(fd, True)
        setattr(sys, name, os.fdopen(fd, mode, encoding="utf-8", errors="backslashreplace"))


def _run() -> int:
    try:
        from ktk.cli import app

        app(prog_name="ktk")
    except SystemExit as stop:
        # typer and rich make it of a broken pipe as well.
        if isinstance(stop.__context__, BrokenPipeError):
            return _UNREAD
        return stop.code if isinstance(stop.code, int) else _fault(stop.code)
    except BrokenPipeError:
        raise
    except _FORESEEN as error:
        _fault(error)
        # A command may say what an interruption left behind.
        return _INTERRUPTED if isinstance(error.__context__, KeyboardInterrupt) else 1
    return 0


def _fault(error: BaseException | str | None) -> int:
    if error is not None:
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"ktk: {text}", file=sys.stderr)
    return int(error is not None)


if __name__ == "__main__":
    main()
