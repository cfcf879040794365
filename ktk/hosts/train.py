"""The operators "ktk::moe_train", "ktk::moe_backward" and "ktk::linear_backward".

"ktk::moe_train" is "ktk::moe" with an adapter, and with the products of gate and up kept for its
backward pass. Factors of the adapter are arguments, so that they are trained as any parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ktk.hosts import linear as linears
from ktk.hosts.numbered import LAYERS, living, plain_inputs
from ktk.lora import FACTORS, Lora
from ktk.training import kept_shape, linear_backward

# What stands for factors that an adapter has, in the order of FACTORS: an operator's argument.
_PARTS = ("gate", "up", "down")


def targets_of(lora: Lora) -> int:
    """Return which matrices an adapter has factors for, as bits."""
    names = {name for name, _ in lora.factors()}
    return sum(1 << bit for bit, part in enumerate(_PARTS) if f"{part}_a" in names)


def train(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    lora: Lora | None,
    layer: int,
    keep: bool,
) -> torch.Tensor:
    """Compute a layer whose gradients torch records.

    Parameters
    ----------
    hidden : tensor [tokens, hidden_size]
    topk_ids, topk_weights : tensor [tokens, k]
    lora : Lora, optional
        Its factors may require gradients.
    layer : int
        `OpLayer.number`.
    keep : bool
        Keep the products of gate and up until the backward pass, which computes them again
        otherwise.
    """
    factors = [] if lora is None else [factor for _, factor in lora.factors()]
    targets, scale = (0, 1.0) if lora is None else (targets_of(lora), float(lora.scale))
    result: torch.Tensor = torch.ops.ktk.moe_train(
        hidden, topk_ids, topk_weights, factors, targets, scale, layer, keep
    )[0]
    return result


def lora_of(factors: Sequence[torch.Tensor], targets: int, scale: float) -> Lora | None:
    """Return the adapter whose factors an operator was given; None for no targets."""
    if not targets:
        return None
    names = [name for name in FACTORS if targets >> _PARTS.index(name[:-2]) & 1]
    each = (factor.detach().cpu().contiguous() for factor in factors)
    return Lora(**dict(zip(names, each, strict=True)), scale=scale)


def _train(
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    factors: Sequence[torch.Tensor],
    targets: int,
    scale: float,
    layer: int,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = plain_inputs(hidden.cpu(), topk_ids.cpu(), topk_weights.cpu())
    lora = lora_of(factors, targets, scale)
    out, kept = living(LAYERS, layer).moe.forward_train(*inputs, lora=lora, save=keep)
    if kept is None:
        kept = torch.empty(0, dtype=torch.bfloat16, device="cpu")
    return out.to(hidden.device), kept


def _train_shape(
    hidden: torch.Tensor, topk_ids: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    _, factors, _, _, layer, keep = others
    rank = factors[0].shape[1] if factors else 0
    shape = kept_shape(living(LAYERS, layer).moe.config, topk_ids.shape, rank) if keep else (0,)
    return hidden.new_empty(hidden.shape), hidden.new_empty(
        shape, dtype=torch.bfloat16, device="cpu"
    )


def _backward(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    kept: torch.Tensor,
    factors: Sequence[torch.Tensor],
    targets: int,
    scale: float,
    layer: int,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    inputs = plain_inputs(hidden.cpu(), topk_ids.cpu(), topk_weights.cpu())
    found = living(LAYERS, layer).moe.backward(
        grad.cpu().contiguous(),
        *inputs,
        saved=kept if kept.numel() else None,
        lora=lora_of(factors, targets, scale),
    )
    each = [] if found.lora is None else [factor for _, factor in found.lora.factors()]
    return (
        found.hidden.to(hidden.device),
        found.topk_weights.to(topk_weights.device, topk_weights.dtype),
        [one.to(like.device, like.dtype) for one, like in zip(each, factors, strict=True)],
    )


def _backward_shape(
    grad: torch.Tensor,
    hidden: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    kept: torch.Tensor,
    factors: Sequence[torch.Tensor],
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    # Each contiguous, as what is computed.
    fresh = [one.new_empty(one.shape) for one in (hidden, topk_weights, *factors)]
    return fresh[0], fresh[1], fresh[2:]


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, topk_ids, topk_weights, factors, *rest = inputs
    ctx.save_for_backward(hidden, topk_ids, topk_weights, output[1], *factors)
    ctx.mark_non_differentiable(output[1])
    ctx.rest = rest[:3]
    ctx.known = LAYERS.get(rest[2])  # which may be the last that keeps it


def _pull(ctx: Any, grad: torch.Tensor, _: Any) -> tuple[Any, ...]:
    hidden, topk_ids, topk_weights, kept, *factors = ctx.saved_tensors
    dx, dw, each = torch.ops.ktk.moe_backward(
        grad, hidden, topk_ids, topk_weights, kept, factors, *ctx.rest
    )
    return dx, None, dw, each, None, None, None, None


def _linear_backward(grad: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    out = torch.empty((*grad.shape[:-1], width), dtype=grad.dtype, device="cpu")
    known = living(linears.LAYERS, layer).linear
    result: torch.Tensor = linear_backward(known, grad.detach().cpu(), out)
    return result.to(grad.device)


def _linear_backward_shape(grad: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return grad.new_empty((*grad.shape[:-1], width))


def _no_second(ctx: Any, *gradients: Any) -> NoReturn:
    raise RuntimeError(
        "ktk has first derivatives of its layers, not second ones, which a backward pass through "
        "gradients (create_graph=True) wants: keep packed layers out of what is differentiated "
        "twice"
    )


_library: Any = torch.library.Library("ktk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "moe_train(Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor[] factors, int targets, "
    "float scale, int layer, bool keep) -> (Tensor, Tensor)"
)
_library.define(
    "moe_backward(Tensor grad, Tensor hidden, Tensor topk_ids, Tensor topk_weights, Tensor kept, "
    "Tensor[] factors, int targets, float scale, int layer) -> (Tensor, Tensor, Tensor[])"
)
_library.define("linear_backward(Tensor grad, int layer, SymInt width) -> Tensor")
for _name, _function, _fake in (
    ("moe_train", _train, _train_shape),
    ("moe_backward", _backward, _backward_shape),
    ("linear_backward", _linear_backward, _linear_backward_shape),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ktk::{_name}", _fake, lib=_library)
torch.library.register_autograd("ktk::moe_train", _pull, setup_context=_save, lib=_library)
# Without these torch would take second derivatives for zeros.
torch.library.register_autograd("ktk::moe_backward", _no_second, lib=_library)
torch.library.register_autograd("ktk::linear_backward", _no_second, lib=_library)
