"""One call of a divided layer: its tokens as they travel, and what all ranks have to agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ktk import _core
from ktk.arrays import refuse_gradient
from ktk.distributed.frames import DTYPES, Header

_IDS = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call, in CPU memory.

    Attributes
    ----------
    hidden : tensor [tokens, hidden_size]
    ids : array of int32 [tokens, k]
    weights : array of f32 [tokens, k]
    """

    hidden: torch.Tensor
    ids: np.ndarray
    weights: np.ndarray

    @property
    def count(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    @property
    def k(self) -> int:
        """Experts of each."""
        return int(self.ids.shape[1])

    @property
    def dtype(self) -> int:
        """Position of the type of `hidden` in `DTYPES`."""
        return DTYPES.index(self.hidden.dtype)


def tokens_of(hidden: Any, topk_ids: Any, topk_weights: Any, width: int, num_ids: int) -> Tokens:
    """Check the arguments of a call, and return them as they travel.

    `num_ids` is how many ids name an expert or a zero expert.

    Raises
    ------
    TypeError, ValueError
        The message is one sentence, for all ranks.
    RuntimeError
        A tensor requires grad.
    """
    given = (("hidden", hidden), ("topk_ids", topk_ids), ("topk_weights", topk_weights))
    for name, tensor in given:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor of torch, got {type(tensor).__name__}")
        refuse_gradient(name, tensor)
    shape, of_ids = hidden.shape, topk_ids.shape
    if len(shape) != 2 or shape[1] != width:
        raise ValueError(f"hidden must have shape [tokens, {width}], got {list(shape)}")
    if len(of_ids) != 2 or of_ids[0] != shape[0] or not of_ids[1]:
        raise ValueError(f"topk_ids must have shape [{shape[0]}, k], got {list(of_ids)}")
    if topk_weights.shape != of_ids:
        raise ValueError(
            "topk_ids and topk_weights must have one shape [tokens, k], got "
            f"{list(of_ids)} and {list(topk_weights.shape)}"
        )
    for (name, tensor), dtypes in zip(given, (DTYPES, _IDS, DTYPES), strict=True):
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name} must be {_names(*dtypes)}, got {_names(tensor.dtype)}")
    if topk_ids.dtype not in (torch.int64, torch.int32):
        topk_ids = topk_ids.int()
    if topk_weights.dtype != torch.float32:
        topk_weights = topk_weights.float()
    ids: Any = _core.expert_ids(_plain(topk_ids).numpy(), num_ids)
    return Tokens(_plain(hidden), ids, _plain(topk_weights).numpy())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in contiguous CPU memory; most are there, and each call costs."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.is_cpu and tensor.is_contiguous() else tensor.cpu().contiguous()


def disagreement(mine: Header, rank: int, others: Mapping[int, Header], *, count: bool) -> str:
    """Say what ranks do not agree on in a call; empty if they do.

    Parameters
    ----------
    mine, rank
        Of this process.
    others
        The first header of the call from each other rank.
    count
        Whether all ranks have to have the same number of tokens.
    """
    every = {**others, rank: mine}
    first, reference = min(every.items())
    for other, header in sorted(every.items()):
        if header.layer != reference.layer:
            return (
                f"rank {other} calls divided layer {header.layer}, and rank {first} layer "
                f"{reference.layer}: all ranks have to call the same layers in the same order"
            )
        if count and header.tokens != reference.tokens:
            return (
                f"rank {other} has {header.tokens} tokens and rank {first} has {reference.tokens}: "
                "ranks that share their tokens have to have the same ones"
            )
    busy = {other: header for other, header in sorted(every.items()) if header.tokens}
    if not busy:
        return ""
    first, reference = next(iter(busy.items()))
    for other, header in busy.items():
        if header.dtype != reference.dtype:
            types = _names(DTYPES[header.dtype]), _names(DTYPES[reference.dtype])
            return f"hidden is {types[0]} on rank {other} and {types[1]} on rank {first}"
        if header.k != reference.k:
            return (
                f"topk_ids has {header.k} experts for a token on rank {other} and {reference.k} on "
                f"rank {first}"
            )
    return ""


def _names(*dtypes: torch.dtype) -> str:
    return ", ".join(str(one).removeprefix("torch.") for one in dtypes)
