"""Where modules of experts keep gate, up and down, as the flags that transformers sets say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktk.config import MoEConfig
from ktk.expert import PARTS

# What `use_experts_implementation` of transformers sets on each module.
FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
#: Names of a module's weights.
WEIGHTS = ("gate_up_proj", "down_proj")
BIASES = ("gate_up_proj_bias", "down_proj_bias")


@dataclass(frozen=True)
class Layout:
    """How the tensors of a module are to be read.

    ===========================  ==========================  ===================
    flags                        gate_up_proj                down_proj
    ===========================  ==========================  ===================
    (none)                       [E, gate then up, H]        [E, H, I]
    transposed                   [E, H, gate then up]        [E, I, H]
    not concatenated             [E, gate, up, gate ..., H]  [E, H, I]
    transposed, not concat.      [E, H, gate, up, gate ...]  [E, I, H]
    with bias                    and [E, 2 I]                and [E, H]
    ===========================  ==========================  ===================

    E experts, H the hidden size, I the intermediate size.
    """

    transposed: bool
    interleaved: bool
    has_bias: bool

    @classmethod
    def of(cls, module: Any) -> Layout | None:
        """Return the layout of a module of experts; None if ktk computes no such experts."""
        if not module.has_gate or module.has_post_expert_norm:
            return None
        return cls(module.is_transposed, not module.is_concatenated, module.has_bias)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the module's tensors."""
        return WEIGHTS + BIASES * self.has_bias

    def sizes(self, module: Any) -> dict[str, int]:
        """Return the sizes in `ktk.MoEConfig` but for k, as the shapes of the tensors say."""
        experts, *shape = module.down_proj.shape
        hidden, intermediate = reversed(shape) if self.transposed else shape
        return {
            "num_experts": experts,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
        }

    def expert(self, module: Any, number: int) -> dict[str, torch.Tensor]:
        """Return one expert as the arguments of `MoE.load_expert`, as views where they can be."""
        joined, down = (getattr(module, name).detach()[number] for name in WEIGHTS)
        if self.transposed:
            joined, down = joined.t(), down.t()
        gate, up = self.split(joined)
        found = {"gate": gate, "up": up, "down": down}
        if self.has_bias:
            joined, bias = (getattr(module, name).detach()[number] for name in BIASES)
            gate, up = self.split(joined)
            found |= {"gate_bias": gate, "up_bias": up, "down_bias": bias}
        return found

    def split(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate and up as views of a tensor that has the rows of both."""
        if self.interleaved:
            return joined[::2], joined[1::2]
        half = len(joined) // 2
        return joined[:half], joined[half:]

    def join_last(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return gate and up side by side in the last dimension, as a product would."""
        if self.interleaved:
            return torch.stack([gate, up], dim=-1).flatten(-2)
        return torch.cat([gate, up], dim=-1)

    def empty(self, config: MoEConfig, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Return a module's weights by name, with room for all experts."""
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        shapes = {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}
        return {
            name: torch.empty(experts, *shape, dtype=dtype, device="cpu")
            for name, shape in shapes.items()
        }

    def put(
        self, weights: Mapping[str, torch.Tensor], number: int, values: Mapping[str, Any]
    ) -> None:
        """Write one expert, given as `expert` returns it, to the weights of a module."""
        joined, down = (weights[name][number] for name in WEIGHTS)
        if self.transposed:
            joined, down = joined.t(), down.t()
        for target, name in zip((*self.split(joined), down), PARTS, strict=True):
            target.copy_(torch.as_tensor(values[name]))


def is_experts(module: Any) -> bool:
    """Whether transformers lets other implementations compute a module."""
    return all(hasattr(module, flag) for flag in FLAGS)
