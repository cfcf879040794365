"""Makes a loaded `MoE` from a layer of a checkpoint."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.checkpoint.open import open_checkpoint
from ktk.registry import load_backend

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.moe import MoE


def load_moe(
    path: str | Path,
    layer: int,
    backend: str | Backend = "BF16",
    *,
    experts: Sequence[int] | None = None,
    physical_to_logical_map: Sequence[int] | None = None,
    **options: Any,
) -> MoE:
    """Load the routed experts of one layer.

    Experts are packed one after the other, from the mapped files where the backend takes what they
    hold: in memory are the packed layer and at most one expert in floats.

    Parameters
    ----------
    path
        Folder with config.json and safetensors files, as published; or a GGUF file, any file of a
        split one, or a folder that holds one model in GGUF files.
    layer
        Number of the layer in the model.
    backend
        A backend or its name.
    experts
        The slots to load; the others take no memory and contribute nothing. Default: all.
    physical_to_logical_map
        Slot p holds expert `physical_to_logical_map[p]` of the checkpoint. Default: p.
    **options
        For `Backend.moe`: variant, pool, shards, ... The sizes come from config.json or the
        metadata of the GGUF file; so does the activation function unless it is given here.

    Raises
    ------
    CheckpointError
        Something is missing, damaged or not what config.json says; the message names it. A
        `CheckpointFormatError` where all is well, but the backend does not take such weights.
    """
    chosen = load_backend(backend) if isinstance(backend, str) else backend
    with open_checkpoint(path) as checkpoint:
        found = checkpoint.layer(operator.index(layer))
        config = checkpoint.config_of(found)
        slots = _slots(config.num_experts, experts, physical_to_logical_map)
        read = checkpoint.reader(found, chosen)
        moe = chosen.moe(**config.arguments(**options))
        for slot in range(config.num_experts):
            if slot in slots:
                moe.load_expert(slot, **read(slots[slot]))
            else:
                moe.leave_out(slot)
    return moe


def _slots(
    count: int, experts: Sequence[int] | None, logical: Sequence[int] | None
) -> dict[int, int]:
    """Return which expert of the checkpoint goes to which slot."""
    wanted = list(range(count)) if experts is None else [operator.index(slot) for slot in experts]
    of_slot = list(range(count)) if logical is None else [operator.index(e) for e in logical]
    if len(of_slot) != count:
        raise ValueError(f"physical_to_logical_map has {len(of_slot)} entries, expected {count}")
    for name, values in (("experts", wanted), ("physical_to_logical_map", of_slot)):
        bad = [value for value in values if not 0 <= value < count]
        if bad:
            raise ValueError(f"{name} has {bad[0]}, expected 0 <= expert < {count}")
    return {slot: of_slot[slot] for slot in wanted}
