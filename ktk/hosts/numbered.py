"""Layers by number, and their inputs: arguments of an operator are tensors and numbers."""

from __future__ import annotations

import gc
import itertools
from typing import Any
from weakref import WeakValueDictionary

import torch

from ktk.dtypes import FLOAT_NAMES

#: Each `OpLayer` that lives, by its `number`.
LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
NUMBERS = itertools.count()
_FLOATS = tuple(FLOAT_NAMES)
_IDS = (torch.int64, torch.int32)


def enter(layers: WeakValueDictionary[int, Any], number: int, layer: Any) -> None:
    """Let a number stand for a layer.

    Raises
    ------
    RuntimeError
        It stands for another, which lives.
    """
    if number in layers:
        gc.collect()  # what a host has let go of may be part of a cycle
    if number in layers:
        raise RuntimeError(
            f"{layer.name} is there already, and its graphs would call this one: two models of one "
            "name cannot be in one process, so give each a process, or let the first go before"
        )
    layers[number] = layer


def living(layers: WeakValueDictionary[int, Any], number: int) -> Any:
    """Return the layer that a number stands for.

    What torch records keeps the layers of its backward pass; compiled graphs do not.

    Raises
    ------
    RuntimeError
        It is gone.
    """
    layer = layers.get(number)
    if layer is None:
        raise RuntimeError(
            "a packed layer that this computation calls is gone: keep the model as long as graphs "
            "that were compiled from it are called"
        )
    return layer


def plain_inputs(
    hidden: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the inputs of a call as a layer takes them."""
    if hidden.stride(-1) != 1:
        hidden = hidden.contiguous()
    if topk_ids.dtype not in _IDS:
        topk_ids = topk_ids.long()
    if topk_weights.dtype not in _FLOATS:
        topk_weights = topk_weights.float()
    return hidden.detach(), topk_ids.contiguous(), topk_weights.detach().contiguous()
