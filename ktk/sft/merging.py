"""Adds an adapter of experts to their weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ktk.config import PARTS
from ktk.dtypes import FLOAT_DTYPES
from ktk.lora import Lora
from ktk.moe import MoE
from ktk.sft.sharded import gathered
from ktk.transformers import adapter
from ktk.transformers.packed import Packed, put


def can_merge(packed: Packed) -> bool:
    """Tell whether experts are packed as floats; codes would have to be quantized again."""
    return packed.dtype is not None


def check_finite(module: Any, packed: Packed) -> None:
    """Raise a ValueError if factors of a module, or sums of it, are not finite: weights were lost.

    Where ranks have parts of the factors, all of them call this.
    """
    lora = adapter.lora_of(module)
    assert lora is not None
    factors = _whole_factors(lora)
    for name, value in factors.items():
        if not value.isfinite().all():
            raise ValueError(
                f"{adapter.parameter_of(name)} of {packed.name} has values that are not finite: "
                "merge a checkpoint of before its training diverged"
            )
    stored = _dtypes(packed).items()
    if all(_is_small(factors, part, lora.scale, dtype) for part, dtype in stored):
        return
    for expert in range(packed.moe.config.num_experts):
        for part, value in _sums(packed, factors, lora.scale, expert).items():
            if not value.isfinite().all():
                raise ValueError(
                    f"{packed.name}: {part} of expert {expert} and its factors have a sum that "
                    f"{value.dtype} cannot hold: merge a checkpoint of before its training "
                    "diverged, or load the model in a wider type"
                )


def merge_into(module: Any, packed: Packed) -> None:
    """Put the sum of a module's weights and its adapter, which stays, in the place of its weights.

    The module gets experts of its own when all of them are packed: what was copied keeps what it
    has, and an interrupted merge leaves the module as it was.
    Where ranks have parts of the factors, each has experts of its own, and all of them call this.
    """
    lora = adapter.lora_of(module)
    assert lora is not None
    moe = _another(packed.moe)
    factors = _whole_factors(lora)
    for expert in range(moe.config.num_experts):
        weights: dict[str, Any] = _sums(packed, factors, lora.scale, expert)
        biases: dict[str, Any] = {
            name: one.cpu().contiguous()
            for name, one in packed.layout.biases(module, expert).items()
        }
        moe.load_expert(expert, **weights, **biases)
    own = Packed(moe, packed.layout, packed.name)
    own.keeps_products = packed.keeps_products
    put(module, own)


def _whole_factors(lora: Lora) -> dict[str, torch.Tensor]:
    return {name: value.detach().float().cpu() for name, value in gathered(lora).factors()}


def _dtypes(packed: Packed) -> dict[str, torch.dtype]:
    """Return what each matrix is stored as, which is floats."""
    formats = (packed.moe.format, packed.moe.up_format, packed.moe.down_format)
    return {
        part: FLOAT_DTYPES[fmt.element]
        for part, fmt in zip(PARTS, formats, strict=True)
        if fmt is not None
    }


def _is_small(
    factors: Mapping[str, torch.Tensor], part: str, scale: float, dtype: torch.dtype
) -> bool:
    """Whether scale * B @ A is too little to take any number of a type beyond its largest one."""
    if f"{part}_a" not in factors:
        return True
    rows = factors[f"{part}_a"].abs().amax(2, keepdim=True)
    most = (factors[f"{part}_b"].abs() @ rows).amax().item() * abs(scale)
    # Half a step between the largest numbers is max * eps / 4, and rounds away; sums round as well.
    return most < torch.finfo(dtype).max * torch.finfo(dtype).eps / 8


def _sums(
    packed: Packed, factors: Mapping[str, torch.Tensor], scale: float, expert: int
) -> dict[str, torch.Tensor]:
    """Return the matrices of an expert with its adapter, rounded to what they are stored as."""
    dtypes = _dtypes(packed)
    found = {}
    for part, unpacked in zip(PARTS, packed.moe.unpack_expert(expert), strict=True):
        if unpacked is None:
            continue
        value = torch.from_numpy(unpacked)
        if f"{part}_a" in factors:
            a, b = factors[f"{part}_a"][expert], factors[f"{part}_b"][expert]
            value = value.addmm(b, a, alpha=scale)
        found[part] = value.to(dtypes[part])
    return found


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
