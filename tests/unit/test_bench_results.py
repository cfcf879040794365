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
    entry["shape"] = "qwen3-30b-a3b"
    measured = {"read_gb_per_s": 33.0, "gb_per_s": 31.2, "bound": "memory"}
    return json.dumps(entry | measured | {"tokens": tokens, "fraction": fraction} | others)


def rows(*lines: str) -> list[results.Row]:
    entries, _ = results.usable(lines)
    return results.rows_of(entries, date="2026-11-22", commit="abcdef0")


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
    later = replace(slow, commit="2222222")
    assert results.counterpart(row, [slow, later, fast]) == later


def test_what_makes_no_cell_is_named() -> None:
    whole = json.dumps({"model": "m", "tokens": 1, "of_limit": 0.5})
    lines = [line(1, 0.9), line(8, 0.9, shape="tiny"), line(8, None, doubt="noise"), line(64, 0.9)]
    entries, left_out = results.usable([*lines, line(32, None, doubt="noise"), whole])
    assert [entry["tokens"] for entry in entries] == [1]
    assert left_out[:3] == [
        "BF16 avx512 bf16 T=8 left out: the shape is tiny, and the tables are of qwen3-30b-a3b",
        "BF16 avx512 bf16 T=8, BF16 avx512 bf16 T=32 left out: ktk bench doubts it: noise",
        "BF16 avx512 bf16 T=64 left out: the tables have no column T=64",
    ]
    assert left_out[3].startswith("T=1 left out: the line has no backend, bound")
    with pytest.raises(ValueError, match="is no line of ktk bench --json"):
        results.usable([line(1, 0.9)[:30]])


def test_cells_that_are_compared_are_counted() -> None:
    known = rows(line(1, 0.93), line(8, 0.90))
    new = rows(line(1, 0.93), line(8, 0.5), line(512, 0.8), line(1, 0.1, variant="avx2"))
    assert results.compare(new, known) == (
        2,
        ["BF16 avx512 bf16 T=8: 0.50, was 0.90 at abcdef0 (2026-11-22)"],
        [
            "BF16 avx512 bf16 2 threads T=512 left out: not in the row of 2026-11-22",
            "BF16 avx2 bf16 2 threads T=1 left out: there is no such row",
        ],
    )


@pytest.mark.parametrize(
    ("text", "status", "what"),
    [
        (line(1, 0.93), 0, "nothing got worse, of 1 cells"),
        (line(1, 0.5), 1, "T=1: 0.50, was 0.93"),
        (line(1, 0.5, shape="tiny"), 2, "the shape is tiny"),
        (line(1, None, doubt="noise"), 2, "nothing was compared"),
        (line(32, 0.9), 2, "T=32 left out: not in the row of"),
        ("", 2, "nothing was compared on Some CPU"),
        ("{", 2, "'{' is no line of ktk bench"),
    ],
)
def test_the_status_of_a_comparison(
    text: str,
    status: int,
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [row] = rows(line(1, 0.93))
    tables, new = tmp_path / "RESULTS.md", tmp_path / "new.jsonl"
    tables.write_text(f"## Any (Some CPU)\n{results.head()}\n{row}\n")
    new.write_text(text)
    monkeypatch.setattr(results, "TABLES", tables)
    monkeypatch.setattr(results, "this_cpu", lambda: "Some CPU")
    monkeypatch.setattr(sys, "argv", ["results.py", "--compare", "--commit", "x", str(new)])
    assert results.main() == status
    said = capsys.readouterr()
    assert what in said.out + said.err
