"""What arguments of `add_lora` and `load_adapter` may be, each told in one sentence.

Torch would take some of what means nothing, and fail at others by errors of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch

from ktk.config import PARTS
from ktk.dtypes import FLOAT_DTYPES
from ktk.lora import LARGEST


def checked_rank(rank: Any) -> int:
    """Return a rank as an int."""
    if not isinstance(rank, Integral) or isinstance(rank, bool):
        raise TypeError(f"rank must be an integer from 1, got {rank!r}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    return int(rank)


def checked_alpha(alpha: Any) -> float:
    """Return alpha, which layers compute with in float32."""
    if not isinstance(alpha, Real) or isinstance(alpha, bool):
        raise TypeError(f"alpha must be a number, got {alpha!r}")
    number: Any = alpha
    # A NaN is not within either.
    if not -LARGEST <= number <= LARGEST:
        raise ValueError(f"alpha must be a finite number of float32, got {alpha!r}")
    return float(number)


def checked_targets(targets: Any) -> tuple[str, ...] | None:
    """Return the matrices that are named, once each, in the order that layers have them."""
    if targets is None:
        return None
    # A string is a sequence, too: of its letters.
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise TypeError(f'targets must be a sequence of names, as ("gate", "up"), got {targets!r}')
    wanted = list(targets)
    if not wanted or any(name not in PARTS for name in wanted):
        raise ValueError(f"targets must be some of {', '.join(PARTS)}, got {targets!r}")
    return tuple(part for part in PARTS if part in wanted)


def checked_dtype(dtype: Any) -> torch.dtype:
    """Return a dtype that factors may have."""
    known = [str(one).removeprefix("torch.") for one in FLOAT_DTYPES.values()]
    listed = f"{', '.join(known[:-1])} or {known[-1]} of torch"
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be {listed}, got {dtype!r}")
    if dtype not in FLOAT_DTYPES.values():
        raise ValueError(f"dtype must be {listed}, got {dtype}")
    return dtype


def checked_switch(name: str, value: Any) -> bool:
    """Return an argument that is on or off."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return value
