"""Writes sizes and times for people."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Write bytes of memory: 2.5 GiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"


def gigabytes(nbytes: float) -> str:
    """Write bytes of files: 2.7 GB."""
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def duration(seconds: float) -> str:
    """Write a time: 12 s, 3 min 5 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
