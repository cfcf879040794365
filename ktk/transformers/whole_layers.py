"""A layer of a model with one token in one call, where norms, attention and experts are ktk's.

What makes a layer such a one is looked at once, and then whether it is still as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.hosts.plain import is_constant
from ktk.transformers import moe_blocks
from ktk.transformers.bare import are_bare
from ktk.transformers.moe_blocks import FastBlock
from ktk.transformers.norms import FastNorm
from ktk.transformers.steps import FastAttention
from ktk.transformers.unchanged import Unchanged

#: Of the first half of a layer, and of the second: a norm, and what computes what is added.
HALVES = (("input_layernorm", "self_attn"), ("post_attention_layernorm", "mlp"))


class WholeLayer:
    """What a layer is called with beside its token.

    Parameters
    ----------
    layer
        A module whose parts are bare and ktk's.
    norms : tensors or Nones
        Weights of queries' and keys' norms.
    routed
        Of `moe_blocks.prepare`.
    """

    def __init__(self, layer: Any, norms: Any, routed: tuple[_core.MoE, tuple[Any, ...]]) -> None:
        (before, attention), (between, block) = (
            [layer._modules[name] for name in half] for half in HALVES
        )
        self._layer = layer
        self._step, self._number, self._norms = attention.ktk_step, attention.layer_idx, norms
        self._experts, (self._router, self._bias, *self._choice) = routed
        self._before, self._between = before.weight.detach(), between.weight.detach()
        self._kinds = before.ktk_norm, between.ktk_norm
        self._seen = seen = Unchanged()
        for half in HALVES:
            seen.add_children(layer, *half)
        for norm in before, between:
            seen.add_bare(norm)
            seen.add(norm, "ktk_norm")
            seen.add_weights(norm, "weight")
        seen.add(attention, "ktk_step")
        self._step.watch(attention, seen)
        moe_blocks.watch(block, seen)

    def holds_for(self, layer: Any, dtype: torch.dtype) -> bool:
        """Tell whether a module is the layer, as it was, and a dtype that of its weights."""
        return self._layer is layer and self._before.dtype == dtype and self._seen.holds()

    def __call__(self, x: torch.Tensor, **options: Any) -> torch.Tensor | None:
        """Return what the layer makes of a token; None where options want something else."""
        call = self._step.prepared(self._norms, self._number, x, **options)
        if call is None:
            return None
        out = torch.empty_like(x)
        step: Any = _core.layer_step
        step(
            self._step.core,
            self._experts,
            to_dlpack(x),
            to_dlpack(self._before),
            self._kinds[0],
            *call.arguments(),
            to_dlpack(self._between),
            self._kinds[1],
            to_dlpack(self._router),
            None if self._bias is None else to_dlpack(self._bias),
            *self._choice,
            to_dlpack(out),
        )
        call.room.show(call.layer)
        return out

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # a copy of the layer looks for itself


def whole_layer(layer: Any, x: torch.Tensor) -> WholeLayer | None:
    """Return how a layer computes a token like `x`; None where a part of it is not ktk's."""
    (before, attention), (between, block) = (
        [layer._modules[name] for name in half] for half in HALVES
    )
    norms = before, between
    if (
        not isinstance(attention, FastAttention)
        or not isinstance(block, FastBlock)
        or block.training
        or not all(isinstance(one, FastNorm) and is_constant(one.weight, x.dtype) for one in norms)
        or not are_bare((*norms, attention, block))  # type: ignore[arg-type]
    ):
        return None
    gate, experts = block._modules["gate"], block._modules["experts"]
    heads = attention.ktk_step.constants(attention, x.dtype)
    routed = moe_blocks.prepare(gate, experts, x)
    if heads is None or routed is None or moe_blocks.has_adapter(experts):
        return None
    return WholeLayer(layer, heads, routed)
