"""What tools/fuzz runs for hours, for seconds: known inputs, and a few made of them.

Inputs that failed once are in `corpus`. `meson test` replays those of native code.
"""

from __future__ import annotations

import os
import random

import pytest
import targets

COUNT = int(os.environ.get("KTK_MUTANTS", "200"))


@pytest.mark.parametrize("name", targets.TARGETS)
def test_any_input_is_read_or_refused(name: str) -> None:
    target = targets.TARGETS[name]()
    for seed in target.seeds:
        assert target.run(seed), f"{seed[:200]!r} is refused"
    known = targets.inputs(name, target)
    for data in known:
        target.run(data)
    rng = random.Random(1)
    for _ in range(COUNT):
        data = targets.mutated(target, rng.choice(known), rng)
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"{data!r}") from error


def test_a_fault_is_no_refusal() -> None:
    """As `run` tells them apart."""

    def fails(data: bytes) -> None:
        raise KeyError(data)

    with pytest.raises(KeyError):
        targets.Target(fails, (b"{}",)).run(b"{}")
