"""The `ktk` command, also as `python -m ktk`."""

from __future__ import annotations

import codecs
import io
import os
import sys
import warnings

from ktk.status import INTERRUPTED, UNREAD, status_of


def main() -> None:
    """Run the command line; an error that ktk foresaw is one line and not a traceback.

    So is a warning: of a library that will be slow, say.
    """
    _open_closed_streams()
    _print_what_can_be()
    warnings.formatwarning = lambda message, *_, **__: f"ktk: {' '.join(str(message).split())}\n"
    try:
        status = status_of(_app)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = INTERRUPTED
    except BrokenPipeError:
        status = UNREAD
    if status == UNREAD:
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


def _print_what_can_be() -> None:
    """Let names of files that are no text come out as the bytes they are, and all else escaped."""
    codecs.register_error("ktk", _as_bytes)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="ktk")


def _as_bytes(error: UnicodeError) -> tuple[bytes, int]:
    assert isinstance(error, UnicodeEncodeError)
    found = b""
    for one in error.object[error.start : error.end]:
        is_byte = 0xDC80 <= ord(one) <= 0xDCFF  # as Python keeps them
        how = "surrogateescape" if is_byte else "backslashreplace"
        found += one.encode("ascii", how)
    return found, error.end


def _app() -> None:
    from ktk.cli import app

    app(prog_name="ktk")


if __name__ == "__main__":
    main()
