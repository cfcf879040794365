"""Connections of who is no rank, and of ranks that are slow."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from ktk.distributed import connect

SECRET = b"s" * 32
HELLO = connect._HELLO.pack(SECRET, 1, 0)


def answer(listener: socket.socket, seconds: float) -> tuple[int, int]:
    who, connection = connect._answer((listener,), SECRET, time.monotonic() + seconds, {(1, 0)})
    connection.close()
    return who


def test_strangers_hold_ranks_up_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_SILENCE", 0.5)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        silent, slow, wrong, rank = (
            socket.create_connection(listener.getsockname()) for _ in range(4)
        )
        wrong.sendall(connect._HELLO.pack(b"x" * 32, 1, 0))
        rank.sendall(HELLO)

        def speak() -> None:
            while not ended.wait(0.2):
                slow.send(b"s")

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        began = time.monotonic()
        assert answer(listener, 60) == (1, 0)
        # A whole hello takes the slow one 37 times as long as a byte.
        assert 1 <= time.monotonic() - began < 0.2 * len(HELLO)
        ended.set()
        with pytest.raises(ConnectionError, match="rank 1 did not connect in time"):
            answer(listener, 0.2)
        for one in (silent, slow, wrong, rank):
            one.close()


def test_a_hello_may_come_in_parts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rank = socket.create_connection(listener.getsockname())
        rank.sendall(HELLO[:20])
        rest = threading.Timer(0.3, rank.sendall, [HELLO[20:]])
        rest.start()
        assert answer(listener, 60) == (1, 0)
        rest.join()
        rank.close()
