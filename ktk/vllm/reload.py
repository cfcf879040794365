"""How vLLM counts what comes of a layer when it loads weights anew (`reload_weights`).

It puts the parameters on the meta device, calls their loaders only to count the elements that these
copy, and keeps the tensors until the count is full; then it calls the loaders again, with
parameters in memory. Parameters of ktk have no elements: here a tensor counts as one.
"""

from __future__ import annotations

from typing import Any

import torch


def announce(param: Any, tensors: int) -> None:
    """Say how many tensors a parameter stands for."""
    param.weight_loader_numel = tensors


def is_counting(param: Any, tensors: int = 1) -> bool:
    """Whether vLLM calls a loader only to count; then this many tensors are counted."""
    if not param.is_meta:
        return False
    counted = torch.zeros(tensors, dtype=torch.bool, device="cpu")
    counted.copy_(torch.ones_like(counted))
    return True
