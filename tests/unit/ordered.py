"""Experts whose columns are in orders, and layers of them, for the tests of `Matrix.order`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

import ktk
from ktk.expert import Expert, Matrix
from ktk.order import with_sorted_rows
from ktk.quantize import quantize

H, I, E, K = 192, 160, 6, 3  # noqa: E741 - the names of the sizes everywhere
SIZES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
UNGATED = {"up": (I, H), "down": (H, I)}
#: Columns that adapters read in several blocks of 512.
WIDE = {"gate": (1088, 544), "up": (1088, 544), "down": (544, 1088)}
SHAPES = {"gated": SIZES, "without a gate": UNGATED, "wide": WIDE}
#: By backend: what it stores.
FORMATS = {
    "RAWINT4": "u4-f16-g32",
    "AMXINT4": "u4-bf16-zero-u8-g32",
    "AMXINT8": "i8-f32-row",
    "FP8": "e4m3-f32-row",
    "MXFP4": "e2m1-ue8m0-g32",
    "BF16": "bf16",
}
#: Which matrices have an order of their own: x of gate and up, or what down is given.
ORDERED = {
    "x of each expert": ("gate", "up", "down"),
    "down only": ("down",),
    "x only": ("gate", "up"),
    "up only": ("up",),
}


def permutation(k: int, seed: int) -> torch.Tensor:
    return torch.randperm(k, generator=torch.Generator().manual_seed(seed)).int()


def matrix(name: str, shape: tuple[int, int], seed: int) -> Matrix:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    if name == "bf16":
        return Matrix(ktk.Format("bf16"), values.bfloat16())
    return quantize(values, name)


def expert(
    name: str,
    seed: int,
    ordered: tuple[str, ...],
    *,
    joint: bool = True,
    sizes: dict[str, tuple[int, int]] = SIZES,
) -> Expert:
    """Make an expert; gate and up have the same order if `joint`."""
    made: dict[str, Any] = {} if "gate" in sizes else {"gate": None}
    for i, (part, shape) in enumerate(sizes.items()):
        one = matrix(name, shape, 10 * seed + i)
        bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(seed + i))
        order = None
        if part in ordered:
            same = joint and part != "down"
            order = permutation(shape[1], 100 + 10 * seed + (0 if same else i))
        made[part] = replace(one, bias=bias, order=order)
    return Expert(**made)


def layer(backend: str, experts: list[Expert], **options: Any) -> ktk.MoE:
    hidden, intermediate = (len(matrix.data) for matrix in (experts[0].down, experts[0].up))
    config: dict[str, Any] = {
        "num_experts_per_tok": min(K, len(experts)),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
    }
    if experts[0].gate is None:
        config |= {"gated": False, "activation": "relu2"}
    moe = ktk.load_backend(backend).moe(num_experts=len(experts), **config, **options)
    for number, one in enumerate(experts):
        moe.load_expert(number, one)
    return moe


def chosen(
    tokens: int, seed: int = 0, width: int = H
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, generator=generator)
    ids = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(tokens)])
    return hidden, ids, torch.rand(tokens, K, generator=generator)


def plain(one: Expert) -> Expert:
    """The expert as it is in memory, without saying so."""
    parts = with_sorted_rows(one).matrices
    made: dict[str, Any] = {part: replace(one, order=None) for part, one in parts.items()}
    return Expert(**({"gate": None} | made))
