"""Texts that several commands print."""

from __future__ import annotations


def size_text(nbytes: int) -> str:
    """Write a size for people."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes / 1024:.1f} KiB"
