"""Experts that are still in files when `MoE.load_expert` gets them.

One thread that reads everything is slower than workers of which each reads what it packs next: that
comes from the system's cache of files and stays in a core's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ktk.expert import Expert

if TYPE_CHECKING:
    import numpy as np


class OpenFile(Protocol):
    """A file that stays open.

    Attributes
    ----------
    number
        Its descriptor.
    state
        Size and time of change, in ns, that it had and has to have.
    """

    number: int
    state: tuple[int, int]

    def failed(self, error: OSError | None) -> Exception:
        """Return what to raise where reading failed, or, for None, found another file."""


class Unread:
    """Bytes of files, and the memory they belong in, which may hold anything; false if none."""

    def __init__(self) -> None:
        self._reads: list[tuple[OpenFile, int, np.ndarray]] = []

    def __bool__(self) -> bool:
        return bool(self._reads)

    def add(self, file: OpenFile, begin: int, memory: np.ndarray) -> None:
        """Note that a file's bytes from `begin` on belong into an array, uint8 [bytes]."""
        self._reads.append((file, begin, memory))

    @contextmanager
    def reading(self) -> Iterator[list[tuple[int, int, np.ndarray, int, int]]]:
        """Give what `_core.MoE.load_expert` calls unread, and say of its errors what they are.

        Raises
        ------
        CheckpointError
            A file has ended too early, cannot be read, or is not as it was.
        """
        try:
            yield [(file.number, begin, memory, *file.state) for file, begin, memory in self._reads]
        except EOFError as error:
            raise self._file(error.args[0]).failed(None) from None
        except OSError as error:
            if not isinstance(error.filename, int):
                raise  # of a handler of signals, say
            raise self._file(error.filename).failed(error) from error

    def _file(self, index: int) -> OpenFile:
        return self._reads[index][0]


@dataclass(frozen=True, eq=False, kw_only=True)
class UnreadExpert(Expert):
    """An expert of whose matrices not all is read: for `MoE.load_expert` as a whole, nobody else.

    Attributes
    ----------
    unread
        Bytes of their `data`, which may hold anything until `MoE.load_expert` has read them.
    """

    unread: Unread

    @classmethod
    def of(cls, expert: Expert, unread: Unread) -> UnreadExpert:
        """Make one of what is read, and of what is not."""
        return cls(gate=expert.gate, up=expert.up, down=expert.down, unread=unread)
