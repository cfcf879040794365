"""Factors of low rank beside the matrices of a layer of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ktk.arrays import Array, readable

#: Names of the factors in the order that the core takes them.
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
#: The largest number of float32, which layers compute with.
LARGEST = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, eq=False)
class Lora:
    """One adapter: an expert's matrix W acts as ``W + scale * B @ A``.

    Parts of low rank of gate and up are added before the activation function.

    Parameters
    ----------
    gate_a, up_a : array [experts, rank, hidden_size], optional
        bf16, f16 or f32, contiguous, in CPU memory. A matrix without factors stays as it is; A and
        B come together, and all factors of an adapter have one rank.
    gate_b, up_b : array [experts, intermediate_size, rank], optional
    down_a : array [experts, rank, intermediate_size], optional
    down_b : array [experts, hidden_size, rank], optional
    scale : float
        Mostly alpha / rank.

    Raises
    ------
    TypeError
        The scale is no number.
    ValueError
        There are no factors, one of a pair is missing, ranks differ, or the scale is no finite
        number of float32.
    """

    gate_a: Array | None = None
    gate_b: Array | None = None
    up_a: Array | None = None
    up_b: Array | None = None
    down_a: Array | None = None
    down_b: Array | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        ranks: dict[str, int] = {}
        for part in ("gate", "up", "down"):
            a, b = getattr(self, f"{part}_a"), getattr(self, f"{part}_b")
            if (a is None) != (b is None):
                there, missing = ("a", "b") if b is None else ("b", "a")
                raise ValueError(f"there is {part}_{there}, but {part}_{missing} is missing")
            if a is None:
                continue
            for name, array in ((f"{part}_a", a), (f"{part}_b", b)):
                if len(getattr(array, "shape", ())) != 3:
                    raise ValueError(f"{name} must be an array of three dimensions, got {array!r}")
            ranks |= {f"{part}_a": a.shape[1], f"{part}_b": b.shape[2]}
        if not ranks:
            raise ValueError("an adapter needs factors of gate, up or down")
        if len(set(ranks.values())) > 1:
            listed = ", ".join(f"{rank} of {name}" for name, rank in ranks.items())
            raise ValueError(f"all factors of an adapter have one rank, got {listed}")
        try:
            if isinstance(self.scale, (str, bytes)):
                raise TypeError
            scale = float(self.scale)
        except OverflowError:
            scale = math.inf
        except (TypeError, ValueError):
            raise TypeError(f"scale must be a number, got {self.scale!r}") from None
        # A NaN is not within either.
        if not -LARGEST <= scale <= LARGEST:
            raise ValueError(f"scale must be a finite number of float32, got {self.scale!r}")

    @property
    def rank(self) -> int:
        """Columns of B, and rows of A."""
        return next(int(array.shape[1]) for name, array in self.factors() if name.endswith("a"))

    def factors(self) -> Iterator[tuple[str, Array]]:
        """Yield the factors that there are, with their names."""
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name != "scale" and value is not None:
                yield one.name, value

    def given(self) -> tuple[int, float, list[Any]]:
        """Return what the core reads."""
        arrays = [readable(name, getattr(self, name)) for name in FACTORS]
        return self.rank, float(self.scale), arrays


#: One adapter for all tokens, or several of which each token names one.
Adapters = Lora | Sequence[Lora]


def given_adapters(lora: Adapters | None, adapter_ids: Array | None) -> list[Any]:
    """Return the adapters of a call as the core reads them.

    Raises
    ------
    TypeError
        They are none.
    ValueError
        There are several, and nothing says which token has which.
    """
    adapters = [lora] if isinstance(lora, Lora) else list(lora or ())
    for one in adapters:
        if not isinstance(one, Lora):
            raise TypeError(f"lora must be a ktk.Lora or a sequence of such, got {one!r}")
    if adapter_ids is None and len(adapters) > 1:
        raise ValueError("several adapters need adapter_ids, which say which one a token has")
    if adapter_ids is not None and not adapters:
        raise ValueError("adapter_ids name adapters, but lora gives none")
    return [one.given() for one in adapters]
