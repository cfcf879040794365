"""Fills a layer, from the folder that weight_path names or from tensors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ktk.backend import Backend
from ktk.config import MoEConfig
from ktk.moe import MoE


def as_list(order: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """Return a map of slots as numbers."""
    return None if order is None else [int(expert) for expert in order]


def load_from_path(
    path: str | Path,
    layer_idx: int,
    backend: Backend,
    config: MoEConfig,
    experts: Sequence[int],
    order: Sequence[int] | None,
    **options: Any,
) -> MoE:
    """Load some slots of a layer of a checkpoint, which must have the sizes of `config`.

    With an order there may be more slots than experts, for redundant copies.
    """
    if order is not None:
        options["num_experts"] = config.num_experts
    moe = MoE.from_checkpoint(
        path,
        layer_idx,
        backend,
        experts=experts,
        physical_to_logical_map=order,
        **options,
    )
    for name in ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size"):
        expected, found = getattr(config, name), getattr(moe.config, name)
        if found != expected:
            raise ValueError(f"{path} has {name} {found}, the layer was made for {expected}")
    return moe


def load_from_tensors(
    backend: Backend,
    config: MoEConfig,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    experts: Sequence[int],
    order: Sequence[int] | None,
    **options: Any,
) -> MoE:
    """Pack some slots of a layer from its stacked gate, up and down."""
    gate, up, down = tensors
    for name, stack in (("up_proj", up), ("down_proj", down)):
        if len(stack) != len(gate):
            raise ValueError(f"{name} has {len(stack)} experts, gate_proj has {len(gate)}")
    sources = range(len(gate)) if order is None else order
    if len(sources) != config.num_experts:
        raise ValueError(f"{len(sources)} experts are given for a layer of {config.num_experts}")
    moe = MoE(backend, config, **options)
    wanted = set(experts)
    for slot, expert in enumerate(sources):
        if not 0 <= expert < len(gate):
            raise ValueError(f"slot {slot} is to hold expert {expert} of {len(gate)}")
        if slot in wanted:
            moe.load_expert(slot, gate[expert], up[expert], down[expert])
        else:
            moe.leave_out(slot)
    return moe
