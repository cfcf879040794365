"""A call that was submitted."""

from __future__ import annotations

from typing import NoReturn

from ktk import _core
from ktk.arrays import Array


class Ticket:
    """A call that was submitted; see :meth:`MoE.submit` and :meth:`Linear.submit`.

    Dropping it waits for the call.
    """

    def __init__(self, core: _core.AsyncCall | _core.LinearCall, out: Array) -> None:
        self._core = core
        self._out = out

    @property
    def done(self) -> bool:
        """Whether :meth:`wait` would return at once."""
        return bool(self._core.done)

    def wait(self) -> Array:
        """Wait for the end of the call and return its output; raise what went wrong in it."""
        self._core.wait()
        return self._out

    result = wait

    def __repr__(self) -> str:
        return f"<ktk.Ticket: {'done' if self.done else 'not done'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.Ticket cannot be pickled or copied: its call runs in this process; "
            "pass on what its wait() returns"
        )
