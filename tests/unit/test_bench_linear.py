"""tools/bench/linear.py: dense layers against the machine's limits."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "tools/bench/linear.py"
QUICK = ["--rounds", "1", "--seconds", "0.01", "--threads", "1", "--rotate", "0", "--noise", "1"]


def test_a_line_for_each_size_count_and_backend(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    main(
        [*QUICK, "--size", "96,256", "-b", "BF16", "-b", "AMXINT8:row", "--tokens", "1,5", "--json"]
    )
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [r["tokens"] for r in results] == [1, 1, 5, 5]
    for result in results:
        assert result["us"] > 0
        assert result["gb_per_s"] == pytest.approx(result["packed_mb"] / result["us"] * 1e3)
        assert (result["fraction"] is None) == bool(result["doubt"])
    # 16 bits for a weight of BF16, and a scale of 4 bytes for each row of int8.
    assert results[0]["packed_mb"] == pytest.approx(96 * 256 * 2 / 1e6)
    assert results[1]["packed_mb"] >= 96 * (256 + 4) / 1e6
    main([*QUICK, "--size", "8200,32", "--backend", "BF16"])
    line = capsys.readouterr().out
    assert line.startswith("8200x32 T=1 BF16/")
    assert "reached" in line


class Probe:
    """Limits of a machine that change while they are looked at."""

    threads = 1

    def __init__(self, reads: Sequence[float], peaks: Sequence[float]) -> None:
        self._reads: Iterator[float] = cycle(reads)
        self._peaks: Iterator[float] = cycle(peaks)

    def read(self, seconds: float) -> float:
        return next(self._reads)

    def peak(self, unit: str, seconds: float) -> float:
        return next(self._peaks)


@pytest.mark.parametrize(
    ("tokens", "reads", "peaks", "bound", "doubted"),
    [
        (512, [1e9, 2e9, 1e9, 1e9], [4.4e9], "compute", False),
        (512, [1e9], [4.4e9, 8.8e9, 4.4e9, 4.4e9], "compute", True),
        (1, [1e6], [4.4e9, 8.8e9, 4.4e9, 4.4e9], "memory", False),
        (1, [1e6, 2e6, 1e6, 1e6], [4.4e9], "memory", True),
    ],
)
def test_a_layer_is_judged_by_the_limit_that_binds_it(
    tokens: int, reads: list[float], peaks: list[float], bound: str, doubted: bool
) -> None:
    measure = runpy.run_path(str(SCRIPT))["measure"]
    candidate: Any = SimpleNamespace(name="x", units=("u",), nbytes=1000, turn=lambda *_: 1e-3)
    options = SimpleNamespace(seconds=0.001, rounds=3, noise=1)
    [found] = measure([candidate], 64, 64, tokens, Probe(reads, peaks), options)
    assert found["bound"] == bound
    assert bool(found["doubt"]) == doubted


def test_more_threads_than_cpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runpy.run_path(str(SCRIPT))["main"](["--threads", "99999"])
    assert "99999 threads are more than the " in capsys.readouterr().err
