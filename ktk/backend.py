"""A backend: where it comes from, and what it is once it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from typing import NoReturn

from ktk import _core
from ktk.config import MoEConfig
from ktk.linear import Linear
from ktk.moe import Formats, MoE


@dataclass(frozen=True)
class BackendInfo:
    """Where a backend comes from, as its package's metadata says.

    Attributes
    ----------
    name
        The name that `load_backend` takes.
    distribution, version
        The installed package that provides it; empty for an object that none announces.
    value
        The module or object that is imported, as in the entry point.
    built
        False for a backend that ktk announces, but that this build of ktk was made without.
    rivals
        Other distributions that provide a backend of the same name.
    """

    name: str
    distribution: str
    version: str
    value: str
    built: bool = True
    rivals: tuple[str, ...] = ()
    entry: EntryPoint | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        if not self.distribution:
            return f"{self.name} ({self.value}, not installed)"
        return f"{self.name} of {self.distribution} {self.version}"


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
        """Name as registered, which :func:`ktk.load_backend` takes."""
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

    def moe(
        self,
        *,
        num_experts: int,
        num_experts_per_tok: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str = "silu",
        activation_limit: float | None = None,
        activation_alpha: float = 1.702,
        clamp_gate_below: bool = False,
        gate_softcap: float | None = None,
        up_softcap: float | None = None,
        gated: bool = True,
        apply_router_weight_on_input: bool = False,
        zero_expert_num: int = 0,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: Formats | None = None,
    ) -> MoE:
        """Make a layer of experts, without weights yet.

        Parameters
        ----------
        num_experts, num_experts_per_tok, hidden_size, intermediate_size : int
            Sizes, as in :class:`ktk.MoEConfig`.
        activation, activation_limit, activation_alpha, clamp_gate_below, gate_softcap, up_softcap
            The activation function, as in :class:`ktk.MoEConfig`.
        gated : bool
            Whether experts have a gate, as in :class:`ktk.MoEConfig`.
        apply_router_weight_on_input : bool
            Where routing weights multiply, as in :class:`ktk.MoEConfig`.
        zero_expert_num : int
            Experts beside these that return what goes in, as in :class:`ktk.MoEConfig`.
        variant, force, pool, shards, weight_format
            How the layer is computed, as in :class:`ktk.MoE`.

        Returns
        -------
        MoE
            To be filled by :meth:`ktk.MoE.load`.

        Raises
        ------
        BackendUnsupported
            The variant cannot run on this CPU.
        TypeError, ValueError
            A size or an option makes no sense.
        """
        config = MoEConfig(
            num_experts=num_experts,
            num_experts_per_tok=num_experts_per_tok,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            activation=activation,
            activation_limit=activation_limit,
            activation_alpha=activation_alpha,
            clamp_gate_below=clamp_gate_below,
            gate_softcap=gate_softcap,
            up_softcap=up_softcap,
            gated=gated,
            apply_router_weight_on_input=apply_router_weight_on_input,
            zero_expert_num=zero_expert_num,
        )
        return MoE(
            self,
            config,
            variant=variant,
            force=force,
            pool=pool,
            shards=shards,
            weight_format=weight_format,
        )

    def linear(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: _core.Format | str | Sequence[_core.Format | str | None] | None = None,
    ) -> Linear:
        """Make a dense layer, without a weight yet.

        Parameters
        ----------
        in_features, out_features, bias, variant, force, pool, shards, weight_format
            As of :class:`ktk.Linear`.

        Returns
        -------
        Linear
            To be filled by :meth:`ktk.Linear.load`.

        Raises
        ------
        BackendUnsupported
            The variant cannot run on this CPU.
        TypeError, ValueError
            A size or an option makes no sense.
        """
        return Linear(
            self,
            in_features,
            out_features,
            bias,
            variant=variant,
            force=force,
            pool=pool,
            shards=shards,
            weight_format=weight_format,
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.Backend cannot be pickled or copied: it is code of this process; load it where "
            f"it is needed, with ktk.load_backend({self.name!r})"
        )

    def __repr__(self) -> str:
        names = ", ".join(v.name for v in self.variants if v.runnable) or "none runs here"
        return f"<ktk.Backend {self.name}: {names}>"
