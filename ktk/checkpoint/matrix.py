"""What one matrix of an expert is, without its values."""

from __future__ import annotations

from dataclasses import dataclass

from ktk._core import Format


@dataclass(frozen=True)
class MatrixInfo:
    """A matrix [n, k], n output columns, in a format."""

    format: Format
    n: int
    k: int
