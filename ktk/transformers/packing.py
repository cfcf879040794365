"""Packs the experts of one module that is in memory."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ktk.backend import Backend
from ktk.names import PREFERRED
from ktk.registry import load_backend
from ktk.transformers.modules import Experts, say_once
from ktk.transformers.packed import Packed, leave_alone, put

#: Keeps each bit of bf16 weights.
DEFAULT_BACKEND = PREFERRED["bf16"][0]


def pack_module(one: Experts, backend: str | Backend | None = None) -> Packed:
    """Pack the experts of a module, one after the other, and free its tensors."""
    chosen = (
        load_backend(backend or DEFAULT_BACKEND) if not isinstance(backend, Backend) else backend
    )
    moe = chosen.moe(**asdict(one.config))
    with torch.no_grad(), torch.device("cpu"):
        for number in range(one.config.num_experts):
            tensors = one.layout.expert(one.module, number)
            arguments: dict[str, Any] = {name: tensor.cpu() for name, tensor in tensors.items()}
            moe.load_expert(number, **arguments)
    packed = Packed(moe, one.layout, one.name)
    put(one.module, packed)
    return packed


def pack_or_leave(one: Experts, backend: str | None = None) -> None:
    """Pack a module that transformers has loaded, unless its tensors are on a disk."""
    if any(tensor.is_meta for tensor in one.module.parameters(recurse=False)):
        say_moved(type(one.module).__name__)
        leave_alone(one.module)
    else:
        pack_module(one, backend)


def say_moved(kind: str) -> None:
    """Say that accelerate moves tensors of a kind of modules in and out."""
    say_once(
        f"the tensors of {kind} are moved by accelerate, so transformers computes its experts: "
        "where ktk packs them from files, they need no device_map"
    )
