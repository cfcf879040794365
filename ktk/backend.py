"""A loaded backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from ktk import _core

if TYPE_CHECKING:
    from ktk.moe import MoE
    from ktk.registry import BackendInfo


class Backend:
    """Weight formats and micro-kernels under one name; made by :func:`ktk.load_backend`.

    Attributes
    ----------
    core : ktk._core.Backend
        The checked table, for :class:`ktk._core.PackedMatrix` and other tools.
    info : BackendInfo
        Where the backend came from.
    library : dict[str, str] or None
        For a backend on a library of the machine: which one was found (``"library"``, a path), in
        what ``"mode"`` it is used, and what else there is to say. None for all others.
    """

    def __init__(
        self, core: _core.Backend, info: BackendInfo, library: dict[str, str] | None = None
    ) -> None:
        self.core = core
        self.info = info
        self.library = library

    @property
    def name(self) -> str:
        """Name as registered: what :func:`ktk.load_backend` takes."""
        return self.info.name

    @property
    def formats(self) -> list[_core.Format]:
        """Formats that weights are stored in; the first one is the default."""
        return list(self.core.formats)

    @property
    def accepts(self) -> list[_core.Format]:
        """Formats that weights may come in."""
        return [given for given, _ in self.core.accepts]

    @property
    def variants(self) -> list[_core.VariantInfo]:
        """Variants by instruction set, best first, those that cannot run here included."""
        return list(self.core.variants)

    def moe(self, **config: Any) -> MoE:
        """Make a layer of experts.

        Parameters
        ----------
        **config
            The fields of :class:`ktk.MoEConfig` and the keywords of :class:`ktk.MoE`.
        """
        from ktk.moe import MoE

        return MoE(self, **config)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.Backend cannot be pickled or copied: it is code of this process; load it where "
            f"it is needed, with ktk.load_backend({self.name!r})"
        )

    def __repr__(self) -> str:
        names = ", ".join(v.name for v in self.variants if v.runnable) or "none runs here"
        return f"<ktk.Backend {self.name}: {names}>"
