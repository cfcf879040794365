"""What a layer of experts says of itself."""

from __future__ import annotations

import functools
import logging
import operator
from typing import TYPE_CHECKING, Any, NoReturn

from ktk import _core as core
from ktk.arrays import Array, readable
from ktk.config import MoEConfig
from ktk.protocols import BackendLike

if TYPE_CHECKING:
    import numpy as np

_log = logging.getLogger(__name__)
_MOST_SHARDS = 1024


def integer(name: str, value: Any) -> int:
    """Return an int of any library, or raise a TypeError with the argument's name."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {value!r}") from None


def check_shards(shards: Any) -> None:
    """Raise a TypeError or ValueError for what is no number of shards; None is the default one."""
    if shards is not None and integer("shards", shards) < 1:
        raise ValueError(f"shards must be at least 1, got {shards}")
    if shards is not None and shards > _MOST_SHARDS:
        raise ValueError(f"shards must be at most {_MOST_SHARDS}, got {shards}")


@functools.cache  # layers of a model are alike
def tell_shards(intermediate_size: int, nodes: int, shards: int) -> None:
    """Log, once for layers that are alike, that not every NUMA node has a shard."""
    if shards < nodes:
        _log.info(
            "weights of intermediate size %d are divided into %d shards, not one for each of %d "
            "NUMA nodes: they cannot be cut finer",
            intermediate_size,
            shards,
            nodes,
        )


def inputs(
    hidden: Array, topk_ids: Array, topk_weights: Array, mask: Array | None
) -> tuple[Array, Array, Array, Array]:
    """Return the inputs of a call as the core reads them."""
    return (
        readable("hidden", hidden),
        readable("topk_ids", topk_ids),
        readable("topk_weights", topk_weights),
        readable("mask", mask),
    )


class PackedLayer:
    """The properties of :class:`ktk.MoE`: what computes, and what is packed how.

    Attributes
    ----------
    backend : Backend
    config : MoEConfig
    """

    backend: BackendLike
    config: MoEConfig
    _core: core.MoE

    def unpack_expert(self, expert: int) -> tuple[np.ndarray | None, np.ndarray, np.ndarray]:
        """Return gate, up and down of an expert as they are stored, in f32; None for no gate."""
        gate, up, down = self._core.unpack_expert(self._slot(expert))
        return gate, up, down

    @property
    def variant(self) -> str:
        """Name of the variant that computes."""
        return str(self._core.variant)

    @property
    def pool(self) -> core.WorkerPool:
        """The workers that compute."""
        return self._core.pool

    @property
    def shards(self) -> int:
        """Parts that the weights are divided into; at most, before an expert is loaded."""
        return int(self._core.shards)

    @property
    def shard_widths(self) -> tuple[int, ...]:
        """Intermediate columns of each shard; none before an expert is loaded."""
        return tuple(sum(slices) for slices in self._core.slices)

    @property
    def format(self) -> core.Format | None:
        """What gate is stored as, or up without one; None before an expert is loaded."""
        return self._core.format

    @property
    def up_format(self) -> core.Format | None:
        """What up is stored as; None before an expert is loaded."""
        return self._core.up_format

    @property
    def down_format(self) -> core.Format | None:
        """What down is stored as; None before an expert is loaded."""
        return self._core.down_format

    @property
    def nbytes(self) -> int:
        """Packed bytes of the experts that are loaded."""
        return int(self._core.nbytes)

    @property
    def loaded(self) -> tuple[int, ...]:
        """The experts that are loaded, ascending; others contribute nothing, or are to come."""
        return tuple(self._core.loaded)

    @property
    def expert_nbytes(self) -> int:
        """Packed bytes of one expert; 0 before one is loaded."""
        return int(self._core.expert_nbytes)

    def _slot(self, expert: int) -> int:
        slot, slots = integer("expert", expert), self.config.num_experts
        if not 0 <= slot < slots:
            raise IndexError(f"expert {slot} is not one of {slots}")
        return slot

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.MoE cannot be pickled or copied: its weights lie packed in the memory of this "
            "process; load another one from the same checkpoint or arrays"
        )

    def __repr__(self) -> str:
        c = self.config
        loaded = self.nbytes // max(self.expert_nbytes, 1)
        of = "" if loaded == c.num_experts else f"{loaded} loaded of "
        return (
            f"<ktk.MoE {self.backend.name}/{self.variant}: {of}{c.num_experts} experts, "
            f"top-{c.num_experts_per_tok}, {c.hidden_size} x {c.intermediate_size}, "
            f"{self.nbytes / 2**20:.0f} MiB>"
        )
