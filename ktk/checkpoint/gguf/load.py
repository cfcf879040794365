"""Makes a loaded `MoE` from a layer of a GGUF file, and says what the file holds."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.checkpoint.describe import Description
from ktk.checkpoint.gguf.experts import GgufCheckpoint
from ktk.checkpoint.load import choose_slots

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.moe import MoE


def load_gguf(
    path: str | Path,
    layer: int,
    backend: Backend,
    *,
    experts: Sequence[int] | None,
    physical_to_logical_map: Sequence[int] | None,
    **options: Any,
) -> MoE:
    """Load the routed experts of one layer; see `ktk.checkpoint.load_moe`."""
    with GgufCheckpoint(path) as checkpoint:
        found = checkpoint.layer(operator.index(layer))
        count = found.config.num_experts
        slots = choose_slots(count, experts, physical_to_logical_map)
        moe = backend.moe(**found.config.arguments(**options))
        for slot in range(count):
            if slot in slots:
                moe.load_expert(slot, **checkpoint.arguments(found, slots[slot], backend))
            else:
                moe.leave_out(slot)
    return moe


def describe_gguf(path: str | Path) -> Description:
    """Return what routed experts the files hold."""
    with GgufCheckpoint(path) as checkpoint:
        config = checkpoint.config
        layers = tuple(checkpoint.layers())
        return Description(
            path=checkpoint.path,
            config=config,
            layers=layers,
            family="gguf",
            dtype=", ".join(checkpoint.types(checkpoint.layer(layers[0]))),
        )
