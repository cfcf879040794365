"""Factors of matrices, which may differ in rank and scale, as those of one adapter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ktk.config import PARTS
from ktk.lora import Lora


@dataclass(frozen=True, eq=False)
class Pair:
    """Both factors of one matrix of an expert.

    Attributes
    ----------
    a : tensor [rank, columns]
    b : tensor [rows, rank]
    scale : float
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Rows of A."""
        return len(self.a)


def as_lora(
    parts: Mapping[str, list[Pair]],
    dtype: torch.dtype | None,
    rank: int | None = None,
    scale: float | None = None,
) -> Lora:
    """Return one adapter of what gate, up and down have.

    Less rank is filled up with zeros. Where scales differ, B is multiplied with what its own is of
    the others', in float32 unless that is a power of two.

    Parameters
    ----------
    parts
        Pairs of all experts by "gate", "up" and "down", whichever there are.
    dtype : torch.dtype, optional
        Of the factors; by default that of the pairs.
    rank : int, optional
        At least that of all pairs, which it is by default.
    scale : float, optional
        By default that of the first pair.
    """
    every = [pair for pairs in parts.values() for pair in pairs]
    rank = rank or max(pair.rank for pair in every)
    scale = every[0].scale if scale is None else scale
    # An alpha of 0 is nothing that can be divided by.
    if not scale and any(pair.scale for pair in every):
        scale = 1.0
    ratios = {one: one / scale if one != scale else 1.0 for one in {pair.scale for pair in every}}
    if dtype is None and any(math.frexp(abs(one))[0] not in (0, 0.5) for one in ratios.values()):
        dtype = torch.float32  # B would be rounded
    factors: dict[str, torch.Tensor] = {}
    for part, pairs in parts.items():
        dtypes = {one.dtype for pair in pairs for one in (pair.a, pair.b)}
        own = dtype or (dtypes.pop() if len(dtypes) == 1 else torch.float32)
        columns, rows = pairs[0].a.shape[1], len(pairs[0].b)
        a = torch.zeros(len(pairs), rank, columns, dtype=own, device="cpu")
        b = torch.zeros(len(pairs), rows, rank, dtype=own, device="cpu")
        for expert, pair in enumerate(pairs):
            a[expert, : pair.rank] = pair.a
            ratio = ratios[pair.scale]
            b[expert, :, : pair.rank] = pair.b if ratio == 1 else pair.b.float() * ratio
        factors |= {f"{part}_a": a, f"{part}_b": b}
    return Lora(**factors, scale=scale)


def alike(loras: Sequence[Lora]) -> list[Lora]:
    """Return adapters of one rank and one scale, as files have them, that do what these do."""
    rank, scale = max(one.rank for one in loras), next((o.scale for o in loras if o.scale), 0.0)
    return [
        one if (one.rank, one.scale) == (rank, scale) else as_lora(_pairs(one), None, rank, scale)
        for one in loras
    ]


def _pairs(lora: Lora) -> dict[str, list[Pair]]:
    given: dict[str, torch.Tensor] = {name: one.detach() for name, one in lora.factors()}
    return {
        part: [
            Pair(a, b, lora.scale)
            for a, b in zip(given[f"{part}_a"], given[f"{part}_b"], strict=True)
        ]
        for part in PARTS
        if f"{part}_a" in given
    }
