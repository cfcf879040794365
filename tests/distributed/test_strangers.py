"""Connections of who is no rank hold nobody up."""

from __future__ import annotations

import socket
import time

import pytest

from ktk.distributed import connect


def test_a_silent_connection_and_a_hello_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "_SILENCE", 0.2)
    secret = b"s" * 32
    with socket.create_server(("127.0.0.1", 0)) as listener:
        strangers = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        strangers[1].sendall(connect._HELLO.pack(b"x" * 32, 1, 0))
        rank = socket.create_connection(listener.getsockname())
        rank.sendall(connect._HELLO.pack(secret, 1, 0)[:20])
        rank.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        with pytest.raises(ConnectionError, match="rank 1 did not connect in time"):
            connect._answer((listener,), secret, began + 1, {(1, 0)})
        assert time.monotonic() - began >= 1
        rank = socket.create_connection(listener.getsockname())
        silent = socket.create_connection(listener.getsockname())
        rank.sendall(connect._HELLO.pack(secret, 1, 0))
        who, connection = connect._answer((listener,), secret, time.monotonic() + 60, {(1, 0)})
        assert who == (1, 0)
        for one in (*strangers, rank, silent, connection):
            one.close()
