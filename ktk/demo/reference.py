"""The layer in float64, by its definition: one expert after another, from the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ktk.activation import glu
from ktk.checkpoint.open import OpenCheckpoint

_Tensors = Mapping[str, torch.Tensor]


def reference(
    checkpoint: OpenCheckpoint,
    layer: Any,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Return what the routed experts give for each token, [T, H] in float64."""
    arguments = checkpoint.config_of(layer).arguments()
    x = hidden.double()
    result = torch.zeros_like(x)
    for expert in sorted(set(ids.flatten().tolist())):
        token, place = (ids == expert).nonzero(as_tuple=True)
        output = _expert(x[token], checkpoint.values(layer, expert), arguments)
        result.index_add_(0, token, output * weights[token, place, None].double())
    return result


def _expert(x: torch.Tensor, tensors: _Tensors, arguments: Mapping[str, Any]) -> torch.Tensor:
    gate = torch.nn.functional.linear(x, tensors["gate"], tensors.get("gate_bias"))
    up = torch.nn.functional.linear(x, tensors["up"], tensors.get("up_bias"))
    limit, alpha = arguments["activation_limit"], arguments["activation_alpha"]
    inner = glu(gate, up, arguments["activation"], limit, alpha)
    return torch.nn.functional.linear(inner, tensors["down"], tensors.get("down_bias"))
