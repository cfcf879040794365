"""MoE layers by name: the sizes of models that people run on CPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ktk.config import MoEConfig


@dataclass(frozen=True, kw_only=True)
class Shape(MoEConfig):
    """Sizes and activation function of one MoE layer, with a name."""

    name: str
    biases: bool = False

    @property
    def weights_per_expert(self) -> int:
        """Number of weights in the matrices of one expert: three, or two without a gate."""
        return len(self.parts) * self.hidden_size * self.intermediate_size

    def flops(self, tokens: int) -> float:
        """Return the operations of the matrix products; a multiply and an add are two."""
        return 2.0 * tokens * self.num_experts_per_tok * self.weights_per_expert

    def with_experts(self, num_experts: int) -> Shape:
        """Return the same layer with fewer (or more) experts, to fit memory.

        The name says so: ``deepseek-v3-e32``.
        """
        if num_experts < self.num_experts_per_tok:
            raise ValueError(
                f"{self.name} sends a token to {self.num_experts_per_tok} experts, "
                f"so {num_experts} are too few"
            )
        if num_experts == self.num_experts:
            return self
        return replace(self, name=f"{self.name}-e{num_experts}", num_experts=num_experts)


def _shape(
    name: str, experts: int, top_k: int, hidden: int, intermediate: int, **others: Any
) -> Shape:
    return Shape(
        name=name,
        num_experts=experts,
        num_experts_per_tok=top_k,
        hidden_size=hidden,
        intermediate_size=intermediate,
        **others,
    )


_OPENAI: dict[str, Any] = {"activation": "swigluoai", "activation_limit": 7.0, "biases": True}

SHAPES = {
    shape.name: shape
    for shape in (
        _shape("qwen3-30b-a3b", 128, 8, 2048, 768),
        _shape("deepseek-v3", 256, 8, 7168, 2048),
        _shape("mixtral-8x7b", 8, 2, 4096, 14336),
        _shape("gpt-oss-20b", 32, 4, 2880, 2880, **_OPENAI),
        _shape("deepseek-v4-flash", 256, 6, 4096, 2048, activation_limit=10.0),
        # Not a model: small enough for a test to run in a second.
        _shape("tiny", 8, 2, 512, 256),
    )
}


def find_shape(name: str) -> Shape:
    """Return the shape called `name`, or raise a ValueError that lists the names."""
    try:
        return SHAPES[name]
    except KeyError:
        raise ValueError(f"no shape {name!r}; known: {', '.join(SHAPES)}") from None
