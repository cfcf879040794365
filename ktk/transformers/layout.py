"""Where modules of experts keep gate, up and down, as the flags that transformers sets say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktk.config import MoEConfig

# What `use_experts_implementation` of transformers sets on each module.
FLAGS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated")
#: Names of weights and biases that modules of experts may have.
WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
BIASES = tuple(f"{name}_bias" for name in WEIGHTS)


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

    Without a gate, up_proj [E, I, H], or transposed [E, H, I], is in the place of gate_up_proj.
    E experts, H the hidden size, I the intermediate size.
    """

    transposed: bool
    interleaved: bool
    has_bias: bool
    gated: bool = True

    @classmethod
    def of(cls, module: Any) -> Layout | None:
        """Return the layout of a module of experts; None if ktk computes no such experts."""
        if module.has_post_expert_norm:
            return None
        interleaved = not module.is_concatenated
        return cls(module.is_transposed, interleaved, module.has_bias, module.has_gate)

    @property
    def weights(self) -> tuple[str, str]:
        """Names of the module's weights: what the hidden states meet first, and down."""
        return ("gate_up_proj" if self.gated else "up_proj", "down_proj")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the module's tensors."""
        return self.weights + tuple(f"{name}_bias" for name in self.weights) * self.has_bias

    def sizes(self, module: Any) -> dict[str, Any]:
        """Return the sizes in `ktk.MoEConfig` but for k, and whether there are gates.

        And how many zero experts, which have no tensors.
        """
        experts, *shape = module.down_proj.shape
        hidden, intermediate = reversed(shape) if self.transposed else shape
        return {
            "num_experts": experts,
            "hidden_size": hidden,
            "intermediate_size": intermediate,
            "gated": self.gated,
            "zero_expert_num": getattr(module, "zero_expert_num", 0),
        }

    def expert(self, module: Any, number: int) -> dict[str, torch.Tensor]:
        """Return one expert as the arguments of `MoE.load_expert`, as views where they can be."""
        first, down = (getattr(module, name).detach()[number] for name in self.weights)
        if self.transposed:
            first, down = first.t(), down.t()
        return {**self.parts(first), "down": down, **self.biases(module, number)}

    def biases(self, module: Any, number: int) -> dict[str, torch.Tensor]:
        """Return the biases of one expert as the arguments of `MoE.load_expert`."""
        if not self.has_bias:
            return {}
        first, down = (getattr(module, f"{name}_bias").detach()[number] for name in self.weights)
        parts = {f"{part}_bias": one for part, one in self.parts(first).items()}
        return {**parts, "down_bias": down}

    def parts(self, first: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return gate and up by name, or up alone, of a tensor that has the rows of both."""
        return (
            dict(zip(("gate", "up"), self.split(first), strict=True))
            if self.gated
            else {"up": first}
        )

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
        """Return a module's weights by name, with room for all experts.

        LongCat-Flash's has rows for zero experts beside those of gate and up, which nobody reads.
        """
        experts, hidden, inner = config.num_experts, config.hidden_size, config.intermediate_size
        first, down = self.weights
        shapes = {first: ((1 + self.gated) * inner, hidden), down: (hidden, inner)}
        shapes = {name: shape[::-1] if self.transposed else shape for name, shape in shapes.items()}
        counts = {first: config.num_ids, down: experts}
        return {
            name: torch.zeros(counts[name], *shape, dtype=dtype, device="cpu")
            for name, shape in shapes.items()
        }

    def put(
        self, weights: Mapping[str, torch.Tensor], number: int, values: Mapping[str, Any]
    ) -> None:
        """Write one expert, given as `expert` returns it, to the weights of a module."""
        first, down = (weights[name][number] for name in self.weights)
        if self.transposed:
            first, down = first.t(), down.t()
        for name, target in {**self.parts(first), "down": down}.items():
            target.copy_(torch.as_tensor(values[name], device="cpu"))


def is_experts(module: Any) -> bool:
    """Whether transformers lets other implementations compute a module."""
    return all(hasattr(module, flag) for flag in FLAGS)
