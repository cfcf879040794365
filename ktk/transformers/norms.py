"""RMS norms in one call, where torch takes seven.

A token of a layer has four norms of some thousand numbers, which torch's calls outlast by far. Of a
prompt they pass its rows through memory seven times, ktk's once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.hosts.plain import is_constant, is_plain
from ktk.pool import default_pool
from ktk.transformers.swap import add_to_class

# Numbers of an input, above which more than one thread pays.
_FEW = 1 << 16
# What modules call the number that keeps a root from being 0.
_EPSILON = ("variance_epsilon", "eps")
# What is added to the weight, and whether values are rounded before they are multiplied with it.
_KINDS = ((0.0, True), (0.0, False), (1.0, False))


class FastNorm:
    """What is added to a class of norms; `ktk_norm` is an entry of `_KINDS` and epsilon."""

    ktk_norm: tuple[float, float, bool]
    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of rows, or what the class would where more is to be done."""
        x, weight = hidden_states, self.weight
        if args or kwargs or not is_plain(x) or not is_constant(weight, x.dtype):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        given = to_dlpack(x.detach()), to_dlpack(weight.detach()), to_dlpack(out)
        _core.rms_norm(*given, *self.ktk_norm, default_pool() if x.numel() > _FEW else None)
        return out


def speed_up_norms(model: nn.Module) -> None:
    """Let ktk compute the norms of a model that are RMS norms, which is found by asking them."""
    for module in model.modules():
        found = None if isinstance(module, FastNorm) else norm_of(module)
        if found is not None:
            setattr(module, "ktk_norm", found)  # noqa: B010
            add_to_class(module, FastNorm)


def norm_of(module: Any) -> tuple[float, float, bool] | None:
    """Return epsilon, offset and rounding of an RMS norm; None if a module is none."""
    epsilon = next((getattr(module, name) for name in _EPSILON if hasattr(module, name)), None)
    weight = getattr(module, "weight", None)
    if (
        "RMSNorm" not in type(module).__name__
        or not isinstance(epsilon, float)
        or list(dict(module.named_parameters())) != ["weight"]
        or type(weight) is not nn.Parameter
        or weight.ndim != 1
        or not weight.is_cpu
        or list(module.children())
    ):
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        x = (
            4 * torch.randn(3, len(weight), generator=generator, dtype=torch.float32, device="cpu")
        ).to(weight.dtype)
        try:
            answer = module(x)
        except Exception:
            return None  # of a class that wants more than rows
        return next(
            (
                (epsilon, *kind)
                for kind in _KINDS
                if isinstance(answer, torch.Tensor)
                and torch.equal(answer, _formula(x, weight, epsilon, *kind))
            ),
            None,
        )


def _formula(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, offset: float, early: bool
) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    if early:
        return weight * values.to(x.dtype)
    return ((offset + weight.float()) * values).to(x.dtype)
