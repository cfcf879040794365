"""Fuzzes one target of targets.py, guided by what of ktk's code is reached: with atheris.

    python guided.py TARGET [arguments of libFuzzer]

`tools/fuzz` calls it.
"""

from __future__ import annotations

import importlib
import random
import sys
import tempfile
from pathlib import Path

import atheris

# Finds what targets import. Not by a statement: mypy knows this file by the name of its folder.
importlib.import_module("conftest")

with atheris.instrument_imports(include=["ktk.checkpoint", "ktk.expert", "ktk.quantize"]):
    import targets


def main() -> None:
    name = sys.argv[1]
    target = targets.TARGETS[name]()

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.7 and data:
            return targets.mutated(target, data, rng)[:most]
        return bytes(atheris.Mutate(data, most))

    with tempfile.TemporaryDirectory() as seeds:
        for number, data in enumerate(targets.inputs(name, target)):
            (Path(seeds) / str(number)).write_bytes(data)
        atheris.Setup(
            [sys.argv[0], "-max_len=65536", *sys.argv[2:], seeds],
            target.run,
            custom_mutator=mutate,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
