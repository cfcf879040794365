"""tools/bench/results.py: rows of RESULTS.md from what `ktk bench --json` prints, and back."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

import results


def line(tokens: int, fraction: float | None, **others: Any) -> str:
    entry = {"backend": "BF16", "variant": "avx512", "format": "bf16", "threads": 2}
    measured = {"read_gb_per_s": 33.0, "gb_per_s": 31.2, "bound": "memory"}
    return json.dumps(entry | measured | {"tokens": tokens, "fraction": fraction} | others)


def rows(*lines: str) -> list[results.Row]:
    return results.rows_of(lines, date="2026-11-22", commit="abcdef0")


def test_a_row_has_fractions_and_the_rates_of_what_memory_binds() -> None:
    [row] = rows(line(1, 0.934), line(8, None), line(512, 0.8, bound="compute"))
    assert str(row) == (
        "| BF16 | avx512 | bf16 | 2 | 33 | 2026-11-22 | abcdef0 "
        "| 0.93 (31) | - | - | - | - | - | - | 0.80 | - |"
    )


def test_rows_are_read_as_they_are_written() -> None:
    [row] = rows(line(1, 0.93, gb_per_s=31.0), line(512, 0.8, bound="compute"))
    text = f"## Some CPU (Vendor 6/1)\n\n{results.head()}\n{row}\n\n## Other (Vendor 6/2)\n{row}\n"
    assert results.section(text, "Vendor 6/1") == [row]
    assert results.section(text, "Vendor 6/3") == []


def test_the_tables_can_be_read() -> None:
    text = results.TABLES.read_text()
    cpus = [
        heading[:-1].rpartition("(")[2] for heading in text.splitlines() if heading[:3] == "## "
    ]
    assert cpus
    assert all(results.section(text, cpu) for cpu in cpus if "/" in cpu or "AMX" in cpu)


@pytest.mark.parametrize("cell", ["0.9", "0.93 (31", "93 %", ".93"])
def test_a_slip_in_a_table_is_named(cell: str) -> None:
    [row] = rows(line(1, 0.93))
    text = f"## CPU (x)\n{str(row).replace('0.93 (31)', cell)}\n"
    with pytest.raises(ValueError, match="which is not like"):
        results.section(text, "x")


def test_what_got_worse_is_named() -> None:
    [old] = rows(line(1, 0.93), line(8, 0.90), line(512, 0.80))
    [new] = rows(line(1, 0.90), line(8, 0.80), line(512, 0.81), line(2048, 0.1))
    assert results.worse(new, old) == [
        "BF16 avx512 bf16 T=8: 0.80, was 0.90 at abcdef0 (2026-11-22)"
    ]


def test_a_row_is_compared_with_the_newest_of_its_subject_and_mode_of_memory() -> None:
    [row] = rows(line(1, 0.9))
    slow = replace(row, date="2026-11-01")
    fast = replace(row, read=60.0, date="2026-11-20")
    unknown = replace(row, read=None, date="2026-11-21")
    other = replace(row, variant="avx2", date="2026-11-21")
    assert results.counterpart(row, [slow, fast, unknown, other]) == slow
    assert results.counterpart(row, [fast, unknown]) == unknown
    assert results.counterpart(row, [other]) is None
