"""tools/bench/linear.py: dense layers against the machine's limits."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

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
