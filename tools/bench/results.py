"""Turn `ktk bench --json` into rows of RESULTS.md, and compare them with those it has.

    ktk bench --json --tokens 1,4,8,32,128,512,2048 > new.jsonl
    python tools/bench/results.py new.jsonl               # rows to add
    python tools/bench/results.py --compare new.jsonl     # status 1 if a cell got worse

The status is 2 where nothing was compared, or there is no row to add. Stderr says what was left
out, and why: lines of another shape or with a doubt, and cells that no row here has.

Fractions of the run's own limit are compared, not times: they say as much on a slow day of the
machine. A row is compared with the newest one of the same CPU, backend, variant, format and number
of threads whose memory was read at about the same rate, if there is one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = Path(__file__).with_name("RESULTS.md")
#: The layer that all rows are of.
SHAPE = "qwen3-30b-a3b"
TOKENS = (1, 2, 4, 8, 16, 32, 128, 512, 2048)
#: What a line has to say.
NEEDED = {"backend", "variant", "format", "threads", "shape", "tokens", "fraction", "bound"}
NEEDED |= {"gb_per_s", "read_gb_per_s"}
HEAD = ("backend", "variant", "format", "threads", "read", "date", "commit")
# One program differs from itself by so much, in runs of the same minutes.
TOLERANCE = 0.05
# Rates of reading further apart are another mode of the machine's memory.
SAME_RATE = 1.25


@dataclass(frozen=True)
class Row:
    """One line of a table: what was measured, when, and by tokens the share of the limit.

    `read` is memory's rate in GB/s, None where nobody wrote it down; `rates` are the weights' in
    GB/s.
    """

    backend: str
    variant: str
    format: str
    threads: int
    read: float | None
    date: str
    commit: str
    fractions: dict[int, float]
    rates: dict[int, float]

    @property
    def name(self) -> str:
        return f"{self.backend} {self.variant} {self.format}"

    @property
    def subject(self) -> tuple[str, str, str, int]:
        return self.backend, self.variant, self.format, self.threads

    def __str__(self) -> str:
        read = "-" if self.read is None else f"{self.read:.0f}"
        names = (self.backend, self.variant, self.format, str(self.threads), read)
        cells = [self._cell(tokens) for tokens in TOKENS]
        return f"| {' | '.join([*names, self.date, self.commit, *cells])} |"

    def _cell(self, tokens: int) -> str:
        if tokens not in self.fractions:
            return "-"
        rate = f" ({self.rates[tokens]:.0f})" if tokens in self.rates else ""
        return f"{self.fractions[tokens]:.2f}{rate}"


def usable(lines: Iterable[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the JSON lines that make cells, and a line for each reason that others do not."""
    entries: list[dict[str, Any]] = []
    left_out: dict[str, list[str]] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if not isinstance(entry, dict):
            raise ValueError(f"{line[:60]!r} is no line of ktk bench --json")
        if reason := _unusable(entry):
            known = [str(entry[name]) for name in ("backend", "variant", "format") if name in entry]
            left_out.setdefault(reason, []).append(" ".join([*known, f"T={entry.get('tokens')}"]))
        else:
            entries.append(entry)
    return entries, [
        f"{', '.join(dict.fromkeys(cells))} left out: {reason}"
        for reason, cells in left_out.items()
    ]


def _unusable(entry: dict[str, Any]) -> str:
    if missing := NEEDED - entry.keys():
        return f"the line has no {', '.join(sorted(missing))}"
    if entry["shape"] != SHAPE:
        return f"the shape is {entry['shape']}, and the tables are of {SHAPE}"
    if entry["tokens"] not in TOKENS:
        return f"the tables have no column T={entry['tokens']}"
    if entry["fraction"] is None:
        return f"ktk bench doubts it: {entry.get('doubt')}"
    return ""


def rows_of(entries: Iterable[dict[str, Any]], *, date: str, commit: str) -> list[Row]:
    """Return a row for each subject of what is usable."""
    found: dict[tuple[str, str, str, int], list[dict[str, Any]]] = {}
    for entry in entries:
        key = entry["backend"], entry["variant"], entry["format"], entry["threads"]
        found.setdefault(key, []).append(entry)
    rows = []
    for key, entries in found.items():
        reads = sorted(float(str(entry["read_gb_per_s"])) for entry in entries)
        by_tokens = {int(str(entry["tokens"])): entry for entry in entries}
        rows.append(
            Row(
                *key,
                read=reads[len(reads) // 2],
                date=date,
                commit=commit,
                fractions={t: float(str(e["fraction"])) for t, e in by_tokens.items()},
                rates={
                    t: float(str(e["gb_per_s"]))
                    for t, e in by_tokens.items()
                    if e["bound"] == "memory"
                },
            )
        )
    return rows


def head() -> str:
    """Return the first two lines of a table."""
    columns = [*HEAD, *(f"T={tokens}" for tokens in TOKENS)]
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def section(text: str, cpu: str) -> list[Row]:
    """Read the rows of a CPU: of the sections of RESULTS.md whose heading ends with its name."""
    rows, is_ours = [], False
    for line in text.splitlines():
        if line.startswith("## "):
            is_ours = line.endswith(f"({cpu})")
        elif is_ours and line.startswith("|") and not re.match(r"\|( backend |---)", line):
            rows.append(_parse(line))
    return rows


def _parse(line: str) -> Row:
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    if len(cells) != len(HEAD) + len(TOKENS):
        raise ValueError(f"RESULTS.md has a row of {len(cells)} cells: {line}")
    backend, variant, fmt, threads, read, date, commit, *values = cells
    fractions, rates = {}, {}
    for tokens, cell in zip(TOKENS, values, strict=True):
        if cell == "-":
            continue
        found = re.fullmatch(r"(\d\.\d\d)(?: \((\d+)\))?", cell)
        if not found:
            raise ValueError(f"RESULTS.md has {cell!r}, which is not like '0.93 (31)': {line}")
        fractions[tokens] = float(found[1])
        if found[2]:
            rates[tokens] = float(found[2])
    rate = None if read == "-" else float(read)
    return Row(backend, variant, fmt, int(threads), rate, date, commit, fractions, rates)


def counterpart(row: Row, known: Sequence[Row]) -> Row | None:
    """Return the newest row of the same subject, of the same mode of memory where there is one.

    Of those of a day, the last one.
    """
    same = [other for other in reversed(known) if other.subject == row.subject]
    close = [other for other in same if _same_rate(row.read, other.read)]
    return max(close or same, key=lambda other: other.date, default=None)


def _same_rate(one: float | None, other: float | None) -> bool:
    return bool(one and other and max(one, other) <= SAME_RATE * min(one, other))


def worse(row: Row, than: Row) -> list[str]:
    """Say of each cell that lost more than `TOLERANCE` of itself what it was."""
    return [
        f"{row.name} T={tokens}: {fraction:.2f}, "
        f"was {than.fractions[tokens]:.2f} at {than.commit} ({than.date})"
        for tokens, fraction in sorted(row.fractions.items())
        if tokens in than.fractions and fraction < than.fractions[tokens] * (1 - TOLERANCE)
    ]


def compare(rows: Iterable[Row], known: Sequence[Row]) -> tuple[int, list[str], list[str]]:
    """Return how many cells were compared, what got worse, and what was left out."""
    compared, losses, left_out = 0, [], []
    for row in rows:
        other = counterpart(row, known)
        have = row.fractions.keys() & other.fractions.keys() if other else set()
        compared += len(have)
        losses += worse(row, other) if other else []
        if missing := sorted(row.fractions.keys() - have):
            cells = ", ".join(f"T={tokens}" for tokens in missing)
            why = f"not in the row of {other.date}" if other else "there is no such row"
            left_out.append(f"{row.name} {row.threads} threads {cells} left out: {why}")
    return compared, losses, left_out


def this_cpu() -> str:
    """Return vendor, family and model, as headings of RESULTS.md have them."""
    from ktk import _core

    vendor, family, model = _core.cpu_id()
    has_amx = "amx_int8" in _core.detected_isa()
    name = f"{vendor} {family}/{model}" if vendor else _core.cpu_model()
    return f"{name}, AMX" if has_amx else name


def say(lines: Iterable[str]) -> None:
    """Print what is no result."""
    for line in lines:
        print(line, file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compare", action="store_true", help="with the rows of RESULTS.md")
    parser.add_argument("--commit", help="what was measured; default: what is checked out")
    parser.add_argument("files", nargs="+", type=Path, help="what ktk bench --json printed")
    arguments = parser.parse_args()
    try:
        return _run(arguments)
    except (OSError, ValueError, ImportError, subprocess.CalledProcessError) as error:
        # Status 1 would say that something got worse.
        say([f"results: {error}"])
        return 2


def _run(arguments: argparse.Namespace) -> int:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=7", "HEAD"]
    commit = (
        arguments.commit
        or subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    )
    lines = [line for file in arguments.files for line in file.read_text().splitlines()]
    entries, left_out = usable(lines)
    rows = rows_of(entries, date=datetime.date.today().isoformat(), commit=commit)
    cpu = this_cpu()
    if not arguments.compare:
        say(left_out)
        if not rows:
            say(["there is no row to add"])
            return 2
        print(f"## ... ({cpu})\n\n{head()}", *rows, sep="\n")
        return 0
    compared, losses, more = compare(rows, section(TABLES.read_text(), cpu))
    say([*left_out, *more])
    if not compared:
        say([f"nothing was compared on {cpu}"])
        return 2
    print(*losses or [f"nothing got worse, of {compared} cells"], sep="\n")
    return bool(losses)


if __name__ == "__main__":
    sys.exit(main())
