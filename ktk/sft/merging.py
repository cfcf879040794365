"""Adds an adapter of experts to their weights."""

from __future__ import annotations

from typing import Any

import torch

from ktk.config import PARTS
from ktk.moe import MoE
from ktk.sft.sharded import gathered
from ktk.transformers import adapter
from ktk.transformers.packed import Packed, put


def can_merge(packed: Packed) -> bool:
    """Tell whether experts are packed as floats; codes would have to be quantized again."""
    return packed.dtype is not None


def check_finite(module: Any, packed: Packed) -> None:
    """Raise a ValueError if factors of a module are not finite: their sum would be lost weights."""
    lora = adapter.lora_of(module)
    assert lora is not None
    for name, value in gathered(lora).factors():
        if not value.isfinite().all():
            raise ValueError(
                f"{adapter.parameter_of(name)} of {packed.name} has values that are not finite: "
                "merge a checkpoint of before its training diverged"
            )


def merge_into(module: Any, packed: Packed) -> None:
    """Put the sum of a module's weights and its adapter, which stays, in the place of its weights.

    The module gets experts of its own when all of them are packed: what was copied keeps what it
    has, and an interrupted merge leaves the module as it was.
    Where ranks have parts of the factors, each has experts of its own, and all of them call this.
    """
    lora = adapter.lora_of(module)
    assert lora is not None
    assert packed.dtype is not None
    moe = _another(packed.moe)
    factors = {name: value.detach().float().cpu() for name, value in gathered(lora).factors()}
    for expert in range(moe.config.num_experts):
        weights: dict[str, Any] = {}
        for part, unpacked in zip(PARTS, packed.moe.unpack_expert(expert), strict=True):
            if unpacked is None:
                continue
            value = torch.from_numpy(unpacked)
            if f"{part}_a" in factors:
                a, b = factors[f"{part}_a"][expert], factors[f"{part}_b"][expert]
                value = value.addmm(b, a, alpha=lora.scale)
            weights[part] = value.to(packed.dtype)
        biases: dict[str, Any] = {
            name: one.contiguous() for name, one in packed.layout.biases(module, expert).items()
        }
        moe.load_expert(expert, **weights, **biases)
    own = Packed(moe, packed.layout, packed.name)
    own.keeps_products = packed.keeps_products
    put(module, own)


def _another(moe: MoE) -> MoE:
    """Return a layer as another one is, without its experts."""
    return MoE(
        moe.backend,
        moe.config,
        variant=moe.variant,
        pool=moe.pool,
        shards=moe.shards,
        weight_format=(moe.format, moe.up_format, moe.down_format),
    )
