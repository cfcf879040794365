"""Connects the ranks of a group of torch with each other."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ktk.distributed.mesh import Mesh
from ktk.errors import SettingError

#: Names the address that other machines reach this one at.
VARIABLE = "KTK_ADDRESS"
_DATA, _CONTROL = 0, 1
# A secret of who is called, and rank and purpose of who calls.
_HELLO = struct.Struct("<32sIB")
# Seconds for a hello.
_SILENCE = 5.0
_meshes: WeakKeyDictionary[Any, Mesh] = WeakKeyDictionary()


def mesh_of(group: Any, timeout: float) -> Mesh:
    """Return the connections between the ranks of a group, made at the first call on all of them.

    Raises
    ------
    ConnectionError
        A rank cannot be reached.
    """
    if (mesh := _meshes.get(group)) is None:
        mesh = _meshes[group] = _connect(group, timeout)
    return mesh


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others of itself."""

    machine: str
    local: str
    addresses: tuple[str, ...]
    port: int
    secret: bytes


def _connect(group: Any, timeout: float) -> Mesh:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    secret = secrets.token_bytes(32)
    local = f"ktk-{secrets.token_hex(16)}"
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as here,
        socket.socket(socket.AF_INET, socket.SOCK_STREAM) as anywhere,
    ):
        here.bind(f"\0{local}")  # abstract: no file is left behind
        addresses = _addresses()
        anywhere.bind(("" if addresses else "127.0.0.1", 0))
        for listener in (here, anywhere):
            listener.listen(2 * size)
        mine = _Card(machine(), local, addresses, anywhere.getsockname()[1], secret)
        cards: list[Any] = [None] * size
        dist.all_gather_object(cards, mine, group=group)
        found: dict[tuple[int, int], socket.socket] = {}
        # Each calls those below it, which listen already: they take calls from their queue later.
        for other in range(rank):
            for purpose in (_DATA, _CONTROL):
                found[other, purpose] = _call(mine, cards[other], other, rank, purpose, timeout)
        end = time.monotonic() + timeout
        wanted = {(other, p) for other in range(rank + 1, size) for p in (_DATA, _CONTROL)}
        while missing := wanted - set(found):
            name, connection = _answer((here, anywhere), secret, end, missing)
            if name in missing:
                found[name] = connection
    for connection in found.values():
        connection.setblocking(False)
        if connection.family == socket.AF_INET:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, control = (
        {other: one for (other, what), one in found.items() if what == purpose}
        for purpose in (_DATA, _CONTROL)
    )
    return Mesh(rank, size, data, control)


def _call(
    mine: _Card, card: _Card, other: int, rank: int, purpose: int, timeout: float
) -> socket.socket:
    """Connect to a rank: without TCP on one machine, else at the first address that answers."""
    errors = []
    for family, address in _ways(mine, card):
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(address)
            connection.sendall(_HELLO.pack(card.secret, rank, purpose))
            return connection
        except OSError as error:
            connection.close()
            errors.append(f"{address}: {error.strerror or error}")
    raise ConnectionError(
        f"rank {rank} cannot reach rank {other} ({'; '.join(errors)}): set {VARIABLE} on each "
        "machine to the address that the others reach it at"
    )


def _ways(mine: _Card, card: _Card) -> Iterator[tuple[socket.AddressFamily, Any]]:
    if mine.machine == card.machine:
        yield socket.AF_UNIX, f"\0{card.local}"
        yield socket.AF_INET, ("127.0.0.1", card.port)
    for address in card.addresses:
        yield socket.AF_INET, (address, card.port)


def _answer(
    listeners: tuple[socket.socket, ...], secret: bytes, end: float, missing: set[tuple[int, int]]
) -> tuple[tuple[int, int], socket.socket]:
    """Take the next call, of a rank that knows the secret."""
    import select

    while True:
        left = end - time.monotonic()
        ready = select.select(listeners, [], [], max(0.0, left))[0]
        if not ready:
            ranks = sorted({rank for rank, _ in missing})
            raise ConnectionError(f"rank {ranks[0]} did not connect in time: did it start?")
        connection, _ = ready[0].accept()
        # A rank says hello at once; who does not, such as a scanner of ports, is not waited for.
        until = time.monotonic() + min(_SILENCE, max(0.1, left))
        with suppress(OSError):
            hello = b""
            # With a timeout, MSG_WAITALL would return what is there.
            while len(hello) < _HELLO.size:
                connection.settimeout(max(0.001, until - time.monotonic()))
                rest = connection.recv(_HELLO.size - len(hello))
                if not rest:
                    break
                hello += rest
            if len(hello) == _HELLO.size:
                said, rank, purpose = _HELLO.unpack(hello)
                if hmac.compare_digest(said, secret):
                    return (rank, purpose), connection
        connection.close()


def machine() -> str:
    """Name this machine, or the part of it that shares a network."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"


def _addresses() -> tuple[str, ...]:
    """Return addresses that other machines may reach this one at, the most likely one first."""
    if given := os.environ.get(VARIABLE):
        try:
            return (socket.gethostbyname(given),)
        except OSError as error:
            raise SettingError(f"{VARIABLE} is {given!r}, which is no address: {error}") from None
    found = []
    # Nothing is sent: the system only says from where it would be.
    for target in (os.environ.get("MASTER_ADDR", ""), "198.51.100.1"):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            found.append(probe.getsockname()[0])
    with suppress(OSError):
        found.append(socket.gethostbyname(socket.gethostname()))
    return tuple(dict.fromkeys(one for one in found if not one.startswith(("127.", "0."))))
