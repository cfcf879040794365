"""Routers of a few tokens in one call, where torch takes six; of a prompt by products of f32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.hosts.plain import is_constant, is_plain
from ktk.transformers.swap import add_to_class

# Tokens, above which torch's products pay.
_MOST = 4


class FastRouter:
    """What is added to a class of routers.

    Attributes
    ----------
    ktk_router
        Whether scores of a token add up to 1, and their dtype; None: that of the logits.
    """

    ktk_router: tuple[bool, torch.dtype | None]
    top_k: int
    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return logits, scores and numbers of experts, or what the class would for many tokens."""
        x, weight, bias = hidden_states, self.weight, getattr(self, "bias", None)
        if args or kwargs or not is_plain(x) or not is_constant(weight, x.dtype):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        sums_to_one, dtype = self.ktk_router
        if x.numel() > _MOST * x.shape[-1]:
            if _has_fast_products(x.dtype):
                return super().forward(x)  # type: ignore[misc]
            return _route_many(x, weight, bias, self.top_k, sums_to_one, dtype or x.dtype)
        tokens = x.numel() // x.shape[-1]
        logits = torch.empty(tokens, len(weight), dtype=x.dtype, device="cpu")
        scores = torch.empty(tokens, self.top_k, dtype=dtype or x.dtype, device="cpu")
        ids = torch.empty(tokens, self.top_k, dtype=torch.int64, device="cpu")
        _core.route(
            to_dlpack(x.detach()),
            to_dlpack(weight.detach()),
            None if bias is None else to_dlpack(bias.detach()),
            to_dlpack(logits),
            to_dlpack(scores),
            to_dlpack(ids),
            sums_to_one,
        )
        return logits, scores, ids


def _has_fast_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of a dtype on this CPU by more than one dot after another.

    For 16 bits oneDNN does, from AVX-512 on. Otherwise a router of 128 experts takes 12.5 ms for
    512 tokens of 2048, and 1.8 ms in f32 (Zen 3, 2 threads).
    """
    if dtype == torch.float32:
        return True
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    asked = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return asked is not None and bool(asked())


def _route_many(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    sums_to_one: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = x.detach().reshape(-1, x.shape[-1]).float()
    added = None if bias is None else bias.detach().float()
    logits = nn.functional.linear(rows, weight.detach().float(), added).to(x.dtype)
    values = logits.float()
    chosen, ids = values.topk(top_k)
    scores = chosen.softmax(-1) if sums_to_one else values.softmax(-1).gather(-1, ids)
    return logits, scores.to(dtype), ids


def speed_up_routers(model: nn.Module) -> None:
    """Let ktk compute the routers of a model that are softmax routers: found by asking them."""
    for module in model.modules():
        found = None if isinstance(module, FastRouter) else router_of(module)
        if found is not None:
            setattr(module, "ktk_router", found)  # noqa: B010
            add_to_class(module, FastRouter)


def router_of(module: Any) -> tuple[bool, torch.dtype | None] | None:
    """Return `FastRouter.ktk_router`; None if a module is no softmax router."""
    weight, top_k = getattr(module, "weight", None), getattr(module, "top_k", None)
    bias = getattr(module, "bias", None)
    if (
        "Router" not in type(module).__name__
        or {"weight", "bias"} < set(dict(module.named_parameters()))
        or type(weight) is not nn.Parameter
        or weight.ndim != 2
        or not weight.is_cpu
        or (bias is not None and (type(bias) is not nn.Parameter or bias.ndim != 1))
        or not isinstance(top_k, int)
        or not 0 < top_k <= len(weight)
        or list(module.children())
    ):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        x = torch.randn(5, weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
        # Logits of some size each, so that a softmax of all of them is no 0 or 1.
        x /= (x @ weight.float().T).abs().amax(-1, keepdim=True).clamp(min=1e-9)
        x = x.to(weight.dtype)
        try:
            logits, scores, ids = module(x)
            expected = nn.functional.linear(x, weight, bias)
            if not torch.equal(logits, expected) or logits.dtype != expected.dtype:
                return None
            for sums_to_one in (True, False):
                if _is(logits, scores, ids, top_k, sums_to_one):
                    return sums_to_one, None if scores.dtype == logits.dtype else scores.dtype
        except Exception:
            return None  # of a class that wants more than rows, or returns something else
    return None


def _is(
    logits: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor, top_k: int, sums_to_one: bool
) -> bool:
    """Tell whether scores are a softmax, but for the order of sums and roundings."""
    probabilities = logits.double().softmax(-1)
    values, chosen = probabilities.topk(top_k)
    if sums_to_one:
        values = values / values.sum(-1, keepdim=True)
    unit = torch.finfo(scores.dtype).eps + len(logits[0]) * torch.finfo(torch.float32).eps
    return (
        scores.shape == values.shape
        and torch.equal(probabilities.gather(-1, ids), probabilities.gather(-1, chosen))
        and bool(((scores.double() - values).abs() <= unit * values).all())
    )
