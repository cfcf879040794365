"""Rotary embeddings of one token in one call, where torch takes fifteen.

Models call a function of their module, by its name. It is replaced where ktk gives the same bits,
which is found by asking it, so that nothing changes for models that ktk computes nothing of.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.dtypes import FLOAT_NAMES
from ktk.hosts.plain import is_plain

#: What modules of transformers call it.
NAME = "apply_rotary_pos_emb"
_OURS = "ktk_rotates"
_Turned = tuple[torch.Tensor, torch.Tensor]


def speed_up_rotary(model: nn.Module) -> None:
    """Let ktk compute the rotary embeddings of a model, where these are what it computes."""
    for kind in {type(module) for module in model.modules()}:
        names = getattr(getattr(kind, "forward", None), "__globals__", {})
        stock = names.get(NAME)
        if callable(stock) and not hasattr(stock, _OURS) and agrees(stock, 1):
            names[NAME] = faster(stock)


def faster(stock: Callable[..., _Turned]) -> Callable[..., _Turned]:
    """Return a function that does the same, for one token by ktk."""
    partly = agrees(stock, 2)

    @functools.wraps(stock)
    def rotary(
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> _Turned:
        if (
            args
            or kwargs
            or not all(map(is_plain, (q, k, cos, sin)))
            or q.ndim != 4
            or q.shape[:3:2] != (1, 1)
            or cos.shape[:-1] != (1, 1)
            or (cos.shape[-1] != q.shape[-1] and not partly)
            or q.dtype not in FLOAT_NAMES
            or not q.dtype == k.dtype == cos.dtype == sin.dtype
        ):
            return stock(q, k, cos, sin, *args, **kwargs)
        return _rotate(q, k, cos, sin)

    setattr(rotary, _OURS, True)
    return rotary


def agrees(stock: Callable[..., _Turned], part: int) -> bool:
    """Tell whether a function gives the bits that ktk gives, where one `part`-th of rows turns."""
    turned = 64 // part
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        for dtype in (torch.float32, torch.bfloat16):
            q, k, cos, sin = (
                torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
                for shape in ((1, 4, 1, 64), (1, 2, 1, 64), (1, 1, turned), (1, 1, turned))
            )
            try:
                same = zip(stock(q, k, cos, sin), _rotate(q, k, cos, sin), strict=True)
                if not all(torch.equal(a, b) for a, b in same):
                    return False
            except Exception:
                return False  # of a function that wants something else
    return True


def _rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> _Turned:
    out = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )
    _core.rotate(*map(to_dlpack, (q, k, cos.view(-1), sin.view(-1), *out)))
    return out
