"""Factors of which `fully_shard` has left each rank a part."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ktk.lora import Lora
from ktk.transformers import adapter


def is_sharded(modules: Sequence[Any]) -> bool:
    """Tell whether ranks have parts of the factors of any of these modules of experts."""
    loras = (adapter.lora_of(module) for module in modules)
    return any(_is_part(value) for lora in loras if lora for _, value in lora.factors())


def leave_parts(model: torch.nn.Module) -> None:
    """Let each rank have its parts alone, as after a step; a forward pass may leave it all."""
    # Nothing is divided without ranks, and importing this takes a while.
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gathered(lora: Lora) -> Lora:
    """Return an adapter whose factors are whole; all ranks have to call this."""
    whole = {name: _whole(value) for name, value in lora.factors()}
    return Lora(**whole, scale=lora.scale)


def check_fits(name: str, module: Any, lora: Lora | None) -> None:
    """Raise a ValueError if an adapter does not fit into sharded factors, which cannot change."""
    if not is_sharded([module]):
        return
    old = adapter.lora_of(module)
    assert old is not None
    had, wanted = (
        {} if one is None else {n: (tuple(v.shape), v.dtype) for n, v in one.factors()}
        for one in (old, lora)
    )
    if had != wanted:
        rank = "none" if lora is None else f"rank {lora.rank} and {_listed(lora)}"
        raise ValueError(
            f"the factors of {name}, of rank {old.rank} and {_listed(old)}, are sharded, and the "
            f"files have {rank}: read them before fully_shard"
        )


@contextlib.contextmanager
def written_once(sharded: bool) -> Iterator[bool]:
    """Yield whether this rank writes what all have gathered, and wait until that is done."""
    if not sharded:
        yield True
        return
    try:
        yield torch.distributed.get_rank() == 0
    finally:
        torch.distributed.barrier()


def _is_part(value: Any) -> bool:
    return hasattr(value, "full_tensor")


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.detach()
    return whole.full_tensor() if _is_part(whole) else whole  # type: ignore[attr-defined]


def _listed(lora: Lora) -> str:
    factors = dict(lora.factors())
    parts = [part for part in ("gate", "up", "down") if f"{part}_a" in factors]
    dtype = str(next(iter(factors.values())).dtype).removeprefix("torch.")
    return f"{dtype} for {', '.join(parts)}"
