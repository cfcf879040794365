"""Writes lists of layers for people."""

from __future__ import annotations


def spans(numbers: list[int]) -> str:
    """Write ascending numbers shortly: 3-60, 62."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
