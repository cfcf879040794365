"""A router and its experts in one call for one token, where a module takes four.

What a module computes is found by asking it: it has to return the bits that ktk does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.hosts.plain import is_constant, is_plain
from ktk.transformers.adapter import SCALE, active_lora, lora_of
from ktk.transformers.bare import are_bare
from ktk.transformers.packed import SLOT, Packed, packed_of
from ktk.transformers.routers import FastRouter
from ktk.transformers.swap import add_to_class
from ktk.transformers.unchanged import Unchanged

# Tokens that a module is asked about, and how large: some have limits.
_SIZES = (1.0, 1.0, 2.0**6)


class FastBlock:
    """What is added to a class whose modules are a router, `gate`, and `experts`."""

    _modules: dict[str, Any]
    training: bool

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what experts make of one token, or what the class would of more."""
        if not args and not kwargs and is_plain(hidden_states) and not self.training:
            found = _compute(self._modules["gate"], self._modules["experts"], hidden_states)
            if found is not None:
                return found
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


def _compute(gate: Any, experts: Any, x: torch.Tensor) -> torch.Tensor | None:
    """Return the sum of the experts that a router chooses; None if ktk does not compute it all."""
    prepared = prepare(gate, experts, x)
    if prepared is None:
        return None
    moe, (weight, bias, *how) = prepared
    out = x.new_empty(x.shape)
    given = to_dlpack(weight), None if bias is None else to_dlpack(bias)
    _core.route_and_compute(moe, to_dlpack(x.detach()), *given, to_dlpack(out), *how)
    return out


def prepare(gate: Any, experts: Any, x: torch.Tensor) -> tuple[_core.MoE, tuple[Any, ...]] | None:
    """Return experts and what ktk is called with for the choice; None if they are not ktk's.

    The latter are weight and bias of the router, how many experts it chooses, whether their scores
    add up to 1 and whether these stay in f32.
    """
    packed = packed_of(experts)
    if not isinstance(gate, FastRouter) or not isinstance(packed, Packed):
        return None
    weight, bias = gate._parameters["weight"], gate._parameters.get("bias")  # type: ignore[attr-defined]
    width = packed.moe.config.hidden_size
    if (
        x.numel() != width
        or x.shape[-1] != width
        or packed.compute is not packed.moe
        or not is_constant(weight, x.dtype)
        or not are_bare((gate, experts))  # type: ignore[arg-type]
        or active_lora(experts) is not None
    ):
        return None
    sums_to_one, dtype = gate.ktk_router
    if dtype not in (None, torch.float32):
        return None
    return packed.moe._core, (
        weight.detach(),
        None if bias is None else bias.detach(),
        gate.top_k,
        sums_to_one,
        dtype is not None,
    )


def has_adapter(experts: Any) -> bool:
    """Tell whether experts have an adapter, even one that is switched off: `watch` sees none."""
    return lora_of(experts) is not None


def watch(block: Any, seen: Unchanged) -> None:
    """Add what `FastBlock` and `prepare` look at, of experts without an adapter."""
    gate, experts = block._modules["gate"], block._modules["experts"]
    seen.add(block, "training")
    seen.add_children(block, "gate", "experts")
    seen.add_bare(block, gate, experts)
    seen.add(gate, "top_k", "ktk_router")
    seen.add_weights(gate, "weight", "bias")
    seen.add(experts, SLOT, SCALE)
    seen.add(packed_of(experts), "moe", "compute")


def speed_up_blocks(model: nn.Module) -> None:
    """Let ktk compute routers with their experts, where a module is nothing but these."""
    for module in model.modules():
        if not isinstance(module, FastBlock) and is_block(module):
            add_to_class(module, FastBlock)


def is_block(module: Any) -> bool:
    """Tell whether a module returns what its experts do with the choice of its router."""
    found = module._modules
    gate, experts = found.get("gate"), found.get("experts")
    packed = None if experts is None else packed_of(experts)
    if not isinstance(gate, FastRouter) or not isinstance(packed, Packed) or module.training:
        return False
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        for size in _SIZES:
            x = size * torch.randn(
                1,
                1,
                packed.moe.config.hidden_size,
                generator=generator,
                dtype=torch.float32,
                device="cpu",
            )
            x = x.to(gate.weight.dtype)
            try:
                wanted = module.forward(x)
                mine = _compute(gate, experts, x)
            except Exception:
                return False  # of a class that wants something else, or experts not loaded yet
            if not isinstance(wanted, torch.Tensor) or mine is None:
                return False
            if wanted.dtype != mine.dtype or not torch.equal(wanted, mine):
                return False
    return True
