"""What a check found: `ktk doctor` prints findings."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, WARNING, PROBLEM = "ok", "note", "warning", "problem"


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes
    ----------
    subject
        What was looked at; for a warning, the resource that binds.
    state
        `ok`; `note`, worth knowing; `warning`, ktk is slower for that than this machine could be;
        `problem`, something does not work at all.
    text
        What was found, a sentence.
    advice
        What can be done; empty where nothing needs to be.
    evidence
        Where that was read, and what stood there: "/proc/stat: ..." or "KTK_THREADS=64".
    """

    subject: str
    state: str
    text: str
    advice: str = ""
    evidence: str = ""


def in_the_way(findings: list[Finding]) -> list[str]:
    """Return the resources that warnings name, each once, in the order of the checks."""
    return list(dict.fromkeys(one.subject for one in findings if one.state == WARNING))


def count(number: int, noun: str) -> str:
    """Return "1 core" or "2 cores"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def numbers(values: list[int]) -> str:
    """Return "0-3,8" for 0, 1, 2, 3 and 8, as Linux and `taskset -c` write lists of CPUs."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and runs[-1][-1] == value - 1:
            runs[-1] = [runs[-1][0], value]
        else:
            runs.append([value])
    return ",".join("-".join(map(str, run)) for run in runs)
