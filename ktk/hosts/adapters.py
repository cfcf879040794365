"""The operator "ktk::moe_adapters": "ktk::moe" with several adapters, of which each token has one.

For inference: `train` has the operators with gradients, and one adapter for all tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ktk.hosts.numbered import LAYERS, living, plain_inputs
from ktk.hosts.train import lora_of, targets_of
from ktk.lora import Adapters, Lora


def by_token(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora: Adapters | None,
    adapter_ids: torch.Tensor | None,
    layer: int,
) -> torch.Tensor:
    """Compute a layer with an adapter for each token.

    Parameters
    ----------
    hidden : tensor [tokens, hidden_size]
    topk_ids, topk_weights : tensor [tokens, k]
    lora, adapter_ids
        As of :class:`ktk.MoE`, whose errors are raised.
    layer : int
        `OpLayer.number`.
    """
    adapters = [lora] if isinstance(lora, Lora) else list(lora or ())
    result: torch.Tensor = torch.ops.ktk.moe_adapters(
        hidden,
        topk_ids,
        topk_weights,
        [factor for one in adapters for _, factor in one.factors()],
        [targets_of(one) for one in adapters],
        [float(one.scale) for one in adapters],
        adapter_ids,
        layer,
    )
    return result


def _compute(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    factors: Sequence[torch.Tensor],
    targets: Sequence[int],
    scales: Sequence[float],
    adapter_ids: torch.Tensor | None,
    layer: int,
) -> torch.Tensor:
    sizes = [2 * one.bit_count() for one in targets]
    if sum(sizes) != len(factors):
        raise ValueError(f"targets name {sum(sizes)} factors, and {len(factors)} are given")
    left = iter(factors)
    lora = [
        lora_of([next(left) for _ in range(size)], bits, scale)
        for size, bits, scale in zip(sizes, targets, scales, strict=True)
    ]
    if adapter_ids is not None:
        adapter_ids = adapter_ids.cpu().contiguous()
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device="cpu")
    inputs = plain_inputs(hidden.cpu(), topk_ids.cpu(), topk_weights.cpu())
    living(LAYERS, layer).moe(*inputs, out=out, lora=lora, adapter_ids=adapter_ids)
    return out.to(hidden.device)


def _shape(hidden: torch.Tensor, *others: Any) -> torch.Tensor:
    return hidden.new_empty(hidden.shape)


def _no_backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "layers whose tokens choose adapters have no backward pass: train each adapter for itself, "
        "as lora= without adapter_ids"
    )


_library: Any = torch.library.Library("ktk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "moe_adapters(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor[] factors, "
    "int[] targets, float[] scales, Tensor? adapter_ids, int layer) -> Tensor"
)
_library.impl("moe_adapters", _compute, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::moe_adapters", _shape, lib=_library)
# Without this torch would say nothing, and take gradients for zeros.
torch.library.register_autograd("ktk::moe_adapters", _no_backward, lib=_library)
