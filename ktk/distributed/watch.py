"""Notices which rank is gone or hangs: a second connection to each, for a few words only.

A rank that gives up tells the others whom it blames, so that all blame the same one, rather than
each the one that gave up before. A rank that waits answers when it is asked.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress

from ktk.distributed.failure import Reason

#: Ranks to blame, why, and who says so; -1: this rank.
Blame = tuple[set[int], Reason, int]

# What is said, a reason, how many ranks, and these.
_MOST = 30
_WORD = struct.Struct(f"<BBH{_MOST}H")
_BLAME, _ASK, _HERE = 1, 2, 3
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
# How long the reason may take that a rank gave, over a network, after its connection ended.
_GRACE = 1.0


class Watch:
    """The connections for words.

    Attributes
    ----------
    asked_after : float
        When ranks were asked last, by the monotonic clock.
    answered : set of int
        Ranks that answered since.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self._to = dict(connections)
        self._rank_of = {connection.fileno(): rank for rank, connection in self._to.items()}
        self._read: dict[int, bytes] = dict.fromkeys(self._to, b"")
        self.gone: set[int] = set()
        self.asked_after = -1.0
        self.answered: set[int] = set()

    def register(self, poll: select.poll) -> None:
        """Let a poll wake up for words."""
        for rank, connection in self._to.items():
            if rank not in self.gone:
                poll.register(connection, select.POLLIN)

    def read(self, ready: Iterable[int]) -> Blame | None:
        """Read what was said on these file descriptors; return whom to blame, if somebody is.

        A rank that just ended is not blamed: what it sent before may be all that it owed, and where
        it is not, its other connection ends behind that.
        """
        for descriptor in ready:
            rank = self._rank_of.get(descriptor)
            if rank is not None and (told := self._words(rank)) is not None:
                return told
        return None

    def end_of(self, rank: int, timeout: float) -> Blame:
        """Say whom to blame when the connection of a rank has ended."""
        end = time.monotonic() + min(_GRACE, timeout)
        while rank not in self.gone and (left := end - time.monotonic()) > 0:
            ready, _, _ = select.select([self._to[rank]], [], [], left)
            if ready and (told := self._words(rank)) is not None:
                return told
        return {rank}, Reason.ENDED, -1

    def ask(self, ranks: Iterable[int]) -> None:
        """Ask ranks whether they wait, too."""
        self.asked_after = time.monotonic()
        self.answered = set()
        for rank in ranks:
            self._say(rank, _ASK)

    def tell(self, ranks: Iterable[int], reason: Reason) -> None:
        """Tell all others whom this rank blames."""
        for rank in self._to:
            self._say(rank, _BLAME, reason, sorted(ranks)[:_MOST])

    def close(self) -> None:
        """Close the connections."""
        for connection in self._to.values():
            connection.close()

    def _words(self, rank: int) -> Blame | None:
        try:
            data = self._to[rank].recv(4096, socket.MSG_DONTWAIT)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            data = b""
        if not data:
            self.gone.add(rank)
            return None
        data = self._read[rank] + data
        while len(data) >= _WORD.size:
            word, reason, count, *ranks = _WORD.unpack_from(data)
            data = data[_WORD.size :]
            if word == _BLAME:
                blamed = set(ranks[:count])
                return blamed, Reason(reason), -1 if blamed == {rank} else rank
            if word == _ASK:
                self._say(rank, _HERE)
            elif word == _HERE:
                self.answered.add(rank)
        self._read[rank] = data
        return None

    def _say(self, rank: int, word: int, reason: int = 0, ranks: list[int] | None = None) -> None:
        named = ranks or []
        padded = [*named, *[0] * (_MOST - len(named))]
        with suppress(OSError):
            self._to[rank].send(_WORD.pack(word, reason, len(named), *padded), _FLAGS)
