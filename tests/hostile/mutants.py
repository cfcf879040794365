"""Makes damaged copies of files: of their bytes, and of what their headers mean."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktk.checkpoint.packed import header as packed_header

#: What JSON can hold where something else is expected.
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 7, 2**31, 2**63, 2**64 - 1, 10**30, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), "", "x", "128", "../m.safetensors", "\0", "a" * 300, "\u20ac"),
    *([], [0, 0], [1], [128, 128], [[1]], ["a"], [None], {}, {"a": 1}, {"weights": 3}),
)
NUMBERS = (0, 1, 2, 7, 31, 32, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Change, cut or insert some bytes, in the first kilobytes most of the time."""
    end = len(data) if rng.random() < 0.2 else min(len(data), 4096)
    at = rng.randrange(end + 1)
    few = rng.randbytes(rng.choice((1, 1, 2, 4, 8, 64)))
    return rng.choice(
        (
            data[:at] + few + data[at + len(few) :],
            data[:at] + few + data[at:],
            data[:at] + data[at + len(few) :],
            data[:at],
            data[:at] + bytes(len(few)) + data[at + len(few) :],
            data + few,
        )
    )


def changed(document: Any, rng: random.Random) -> Any:
    """Put a value elsewhere in a document, leave one out, or name one otherwise."""
    document = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        entries = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(entries):
            places.append((node, key))
            if isinstance(value, dict | list):
                walk(value)

    walk(document)
    for _ in range(rng.choice((1, 1, 2))):
        node, key = rng.choice(places)
        how = rng.random()
        if how < 0.15 and isinstance(node, dict):
            node.pop(key, None)
        elif how < 0.25 and isinstance(node, dict):
            node[rng.choice(("x", "", "\ud800", "a.b"))] = node.pop(key, 0)
        elif how < 0.4:
            other, there = rng.choice(places)
            node[key] = copy.deepcopy(other[there]) if _has(other, there) else 0
        else:
            node[key] = rng.choice(VALUES)
    return document


def _has(node: Any, key: Any) -> bool:
    return key in node if isinstance(node, dict) else key < len(node)


def nested(depth: int) -> bytes:
    """JSON within JSON."""
    return b'{"a":' * depth + b"1" + b"}" * depth


def json_file(data: bytes, rng: random.Random) -> bytes:
    """Change what a JSON file means."""
    if rng.random() < 0.03:
        return nested(rng.choice((900, 100_000)))
    return json.dumps(changed(json.loads(data), rng)).encode()


def safetensors_header(data: bytes, rng: random.Random) -> bytes:
    """Change what the header of safetensors means."""
    size = int.from_bytes(data[:8], "little")
    body = json_file(data[8 : 8 + size], rng)
    return len(body).to_bytes(8, "little") + body + data[8 + size :]


def packed(data: bytes, rng: random.Random) -> bytes:
    """Change what the header of a packed file means, and make its checksum right."""
    size = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + size])
    entries = json_file(document["__metadata__"]["ktk"].encode(), rng).decode()
    document["__metadata__"]["ktk"] = entries
    document["__metadata__"]["ktk_xxh3"] = f"{packed_header.checksum(entries.encode()):016x}"
    body = json.dumps(document).encode()
    return len(body).to_bytes(8, "little") + body + data[8 + size :]


def gguf_header(data: bytes, rng: random.Random) -> bytes:
    """Put a number that matters somewhere into the header of GGUF."""
    return gguf_number(data, rng, data.index(b"blk.0.ffn_up_exps.bias") + 64)


def gguf_number(data: bytes, rng: random.Random, end: int | None = None) -> bytes:
    """Put a number that matters somewhere before `end`."""
    at = rng.randrange(4, len(data) if end is None else end)
    number = struct.pack(
        *rng.choice((("<Q", rng.choice(NUMBERS)), ("<I", rng.choice(NUMBERS) & 0xFFFFFFFF)))
    )
    return data[:at] + number + data[at + len(number) :]


Mutator = Callable[[bytes, random.Random], bytes]
#: By kind of model, then file.
MUTATORS: dict[str, dict[str, tuple[Mutator, ...]]] = {
    "safetensors": {
        "config.json": (damaged, json_file, json_file),
        "model.safetensors.index.json": (damaged, json_file, json_file),
        "model-1.safetensors": (damaged, safetensors_header, safetensors_header),
    },
    "fp8": {
        "config.json": (json_file,),
        "model-1.safetensors": (damaged, safetensors_header),
    },
    "gguf": {"m.gguf": (damaged, gguf_header)},
    "packed": {
        "ktk_packed.json": (damaged, json_file),
        "layer-00000.safetensors": (damaged, safetensors_header, packed, packed),
    },
}


def mutants(folder: Path, kind: str, seed: int) -> Callable[[], str]:
    """Return what damages a file of a folder each time that it is called, and says how.

    The file that was damaged before is whole again.
    """
    rng = random.Random(seed)
    whole = {name: (folder / name).read_bytes() for name in MUTATORS[kind]}

    def mutate() -> str:
        for name, data in whole.items():
            (folder / name).write_bytes(data)
        name = rng.choice(list(whole))
        mutator = rng.choice(MUTATORS[kind][name])
        (folder / name).write_bytes(mutator(whole[name], rng))
        return f"{name} by {mutator.__name__}"

    return mutate
