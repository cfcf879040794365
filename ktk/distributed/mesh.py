"""Connections from a rank to every other one, and frames that go over them.

Torch's own transport cannot say which rank is missing, closes all connections when a wait ends
without an answer, and wakes two threads for every message. So a group of torch is what ranks find
each other with, and tokens travel over these.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ktk.distributed.failure import RankFailed, Reason
from ktk.distributed.frames import HEADER, Header
from ktk.distributed.watch import Blame, Watch

#: Takes a header and the rank it is from; returns where the bytes behind it go.
Accept = Callable[[int, Header], memoryview]
Buffer = bytes | memoryview
# What a wait spins for before it sleeps: a wake-up takes longer than a small message.
_SPIN = 200e-6
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


class _Peer:
    """The state of one exchange with one rank."""

    __slots__ = ("body", "frames", "got", "header", "outgoing", "parsed", "rank", "seen", "socket")

    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank = rank
        self.socket = connection
        self.header = bytearray(HEADER)
        self.outgoing: list[Buffer] = []
        self.frames = self.got = 0
        self.body: memoryview | None = None
        self.parsed: Header | None = None
        self.seen = 0.0

    @property
    def done(self) -> bool:
        return not self.outgoing and not self.frames

    def send(self) -> bool:
        """Send what the connection takes; whether it took anything."""
        if not self.outgoing:
            return False
        try:
            sent = self.socket.sendmsg(self.outgoing[:64], [], _FLAGS)
        except (BlockingIOError, InterruptedError):
            return False
        left = self.outgoing
        at = 0
        while at < len(left) and sent >= len(left[at]):
            sent -= len(left[at])
            at += 1
        self.outgoing = left[at:]
        if sent:
            self.outgoing[0] = memoryview(self.outgoing[0])[sent:]
        return True

    def receive(self, accept: Accept) -> bool:
        """Read what is there; whether there was anything. EOFError at the connection's end."""
        moved = False
        while self.frames:
            into = memoryview(self.header) if self.body is None else self.body
            if self.got < len(into):
                try:
                    count = self.socket.recv_into(into[self.got :], 0, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    return moved
                if not count:
                    raise EOFError
                self.got += count
                moved = True
                if self.got < len(into):
                    continue
            if self.body is None:
                self.parsed = Header.unpack(self.header)
                self.body = accept(self.rank, self.parsed)
            else:
                self.body = None
                self.frames -= 1
            self.got = 0
        return moved


class Mesh:
    """Connections to all other ranks of a group.

    Parameters
    ----------
    rank, size
        Of this process in the group, and of the group.
    data, control
        A connected socket to each other rank, for frames and for what `Watch` says.

    Attributes
    ----------
    others : list of int
        All other ranks.
    sent_bytes : int
        What was sent in frames, headers included.
    turn : Lock
        Who calls a layer holds this: frames of two calls must not mix.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        data: Mapping[int, socket.socket],
        control: Mapping[int, socket.socket],
    ) -> None:
        self.rank = rank
        self.size = size
        self.others = sorted(data)
        self.sent_bytes = 0
        self.turn = threading.Lock()
        self._layers = 0
        self._peers = {other: _Peer(other, data[other]) for other in self.others}
        self._watch = Watch(rank, control)
        self._failure: RankFailed | None = None
        self._patient = False

    def new_layer(self) -> int:
        """Return a number for a layer, the same one on all ranks if all make the same layers."""
        self._layers += 1
        return self._layers - 1

    def check(self) -> None:
        """Raise what has ended the group, if anything has."""
        if self._failure is not None:
            raise self._failure

    def exchange(
        self,
        outgoing: Mapping[int, Sequence[Buffer]],
        frames: int,
        accept: Accept,
        *,
        timeout: float,
        spin: bool = True,
    ) -> None:
        """Send frames to every other rank, and receive as many from each.

        Parameters
        ----------
        outgoing
            Headers and what is behind them, for each other rank.
        frames
            To receive from each.
        accept
            Says where to put what is behind a header. It is called in any order of ranks, and in
            the order of frames for each.
        timeout
            Seconds that a rank may be silent.
        spin
            Whether nothing else here needs the CPU.

        Raises
        ------
        RankFailed
            A rank ended, or was silent for too long. The group is of no use then.
        """
        self.check()
        self._patient = True
        now = time.monotonic()
        for rank, peer in self._peers.items():
            peer.outgoing = [one for one in outgoing[rank] if len(one)]
            self.sent_bytes += sum(map(len, peer.outgoing))
            peer.frames = frames
            peer.seen = now
        busy = list(self._peers.values())
        end = time.perf_counter() + _SPIN if spin else 0.0
        while True:
            moved = False
            for peer in busy:
                try:
                    if peer.send() | peer.receive(accept):
                        moved = True
                        peer.seen = time.monotonic()
                except (EOFError, OSError):
                    self._fail(self._watch.end_of(peer.rank, timeout), timeout)
            if moved:
                busy = [peer for peer in busy if not peer.done]
                if spin:
                    end = time.perf_counter() + _SPIN
            if not busy:
                return
            if not moved and (not spin or time.perf_counter() > end):
                self._wait(busy, timeout)

    def _wait(self, busy: list[_Peer], timeout: float) -> None:
        """Sleep until something can go on, or the time of a rank is over."""
        poll = select.poll()
        for peer in busy:
            wanted = (select.POLLIN if peer.frames else 0) | (
                select.POLLOUT if peer.outgoing else 0
            )
            poll.register(peer.socket, wanted)
        self._watch.register(poll)
        first = min(peer.seen for peer in busy)
        now = time.monotonic()
        asked = self._watch.asked_after >= first
        # Time for answers is left even where this process itself was stopped for a while.
        end = max(first + timeout, self._watch.asked_after + timeout / 4)
        left = (end if asked else first + timeout / 2) - now
        ready = poll.poll(max(0, left) * 1000 + 1) if left > 0 else poll.poll(0)
        told = self._watch.read(descriptor for descriptor, _ in ready)
        if told is not None:
            self._fail(told, timeout)
        if ready or left > 0:
            return
        late = {peer.rank for peer in busy if now - peer.seen >= timeout / 2}
        if not asked:
            self._watch.ask(late)
            return
        late = {peer.rank for peer in busy if now - peer.seen >= timeout}
        # Who answers waits for somebody else, and knows better whom to blame.
        silent = late - self._watch.answered
        if not silent and self._patient:
            self._patient = False
            for peer in busy:
                peer.seen = now
            self._watch.ask(late)
            return
        self._fail((silent or late, Reason.SILENT, -1), timeout)

    def abort(self) -> None:
        """Tell the others that this rank left a call in its middle."""
        if self._failure is None:
            self._failure = RankFailed([self.rank], Reason.RAISED, 0)
            self._watch.tell([self.rank], Reason.RAISED)
            self.close()

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers.values():
            peer.socket.close()
        self._watch.close()

    def _fail(self, blame: Blame, timeout: float) -> None:
        ranks, reason, told_by = blame
        self._failure = RankFailed(ranks, reason, timeout, told_by)
        self._watch.tell(ranks, reason)
        self.close()
        raise self._failure
