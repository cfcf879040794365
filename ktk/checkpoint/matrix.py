"""What one matrix of an expert is, without its values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktk._core import Format

if TYPE_CHECKING:
    from ktk.backend import Backend


@dataclass(frozen=True)
class Matrix:
    """A matrix [n, k], n output columns, in a format."""

    format: Format
    n: int
    k: int

    def refusal(self, backend: Backend) -> str:
        """Return why a backend does not take it; empty if it does."""
        try:
            backend.core.stored_as(self.format, self.n, self.k)
        except ValueError as error:
            return str(error)
        return ""
