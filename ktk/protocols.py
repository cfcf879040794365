"""What lower parts of ktk ask of objects that are made above them."""

from __future__ import annotations

from typing import Protocol

from ktk._core import Backend as CoreBackend
from ktk._core import Format, VariantInfo


class BackendLike(Protocol):
    """What a layer knows of a :class:`ktk.Backend`, which makes layers and so stands above them."""

    @property
    def core(self) -> CoreBackend:
        """The checked table."""

    @property
    def name(self) -> str:
        """Name as registered."""

    @property
    def formats(self) -> list[Format]:
        """Formats that weights are stored in; the first one is the default."""

    @property
    def accepts(self) -> list[Format]:
        """Formats that weights may come in."""

    @property
    def variants(self) -> list[VariantInfo]:
        """Variants by instruction set, best first."""
