"""A command in a pseudo terminal: what it shows, and keys for it; and one in this process."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

_SECONDS = 300
# Where termios has its local modes.
_LOCAL = 3


@dataclass(frozen=True)
class Done:
    """What a command did: exit status, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


Command = Callable[..., Done]


class Terminal:
    """Runs `ktk` in a terminal of 80 columns.

    Attributes
    ----------
    seen : str
        All that was written to the terminal.
    """

    def __init__(self, arguments: Sequence[str], kind: str = "dumb") -> None:
        self._master, slave = pty.openpty()
        # Ctrl-C else throws away what was written and not read yet.
        modes = termios.tcgetattr(slave)
        modes[_LOCAL] |= termios.NOFLSH
        termios.tcsetattr(slave, termios.TCSANOW, modes)
        env = {**os.environ, "TERM": kind, "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ktk", *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env,
            # The terminal is the process's own, so that Ctrl-C in it is a signal.
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        # Reads end where they want, within characters too.
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self.seen = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)

    def type(self, keys: str) -> None:
        """Type on the keyboard; "\\x03" is Ctrl-C, "\\x04" Ctrl-D."""
        os.write(self._master, keys.encode())

    def wait_for(self, text: str, *, after: int = 0) -> int:
        """Wait until the terminal shows something; returns where that ends in `seen`."""
        end = time.monotonic() + _SECONDS
        while text not in self.seen[after:]:
            assert time.monotonic() < end, f"{text!r} does not come: {self.seen!r}"
            assert self._read(), f"ended before {text!r}: {self.seen!r}"
        return self.seen.index(text, after) + len(text)

    def status(self) -> int:
        """Read until the command has ended, and return its exit status."""
        while self._read():
            pass
        return self.process.wait(_SECONDS)

    def interrupt(self) -> int:
        """Press Ctrl-C until the command has ended, and return its exit status.

        Python's readline does not see a signal between showing its prompt and waiting for keys.
        """
        for _ in range(_SECONDS // 5):
            with contextlib.suppress(OSError):  # it has just ended
                self.type("\x03")
            again = time.monotonic() + 5  # one more would hurt a command that is about to end
            while time.monotonic() < again:
                if not self._read(again - time.monotonic()) and self.process.poll() is not None:
                    return self.process.returncode
        raise AssertionError(f"Ctrl-C does not end it: {self.seen!r}")

    def _read(self, seconds: float = _SECONDS) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(seconds, 0))
        try:
            data = os.read(self._master, 4096) if ready else b""
        except OSError:  # how Linux says that nobody has the other end
            return False
        self.seen += self._decode(data).replace("\r\n", "\n")
        return bool(data)


def _take_terminal() -> None:
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
