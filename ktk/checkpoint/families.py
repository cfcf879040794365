"""How model families name and lay out the weights of their experts: one row each.

A row maps the parts of an expert to tensors. Names are relative to the layer (`PREFIXES`); `{e}`
stands for the expert. Axes are written in the order they are stored:

    E   experts (a fused tensor; without it there is a tensor per expert)
    H   hidden size
    I   intermediate size
    2I  gate and up in one axis: all rows of gate, then all rows of up
    I2  gate and up in one axis, alternating: gate 0, up 0, gate 1, up 1, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What stands before the names below; {L} is the layer.
PREFIXES = (
    "model.layers.{L}.",
    "model.language_model.layers.{L}.",
    "language_model.model.layers.{L}.",
    "layers.{L}.",
)


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint: its name under the layer, and its axes.

    They are those of weights that are stored as floats. Quantised ones are several tensors, whose
    names begin with `stem` and whose shapes `storage` knows.
    """

    name: str
    axes: str

    @property
    def stem(self) -> str:
        """The name of the matrix."""
        return self.name.removesuffix(".weight")

    @property
    def fused(self) -> bool:
        """Whether all experts share this tensor."""
        return self.axes.split()[0] == "E"


@dataclass(frozen=True)
class Family:
    """A naming scheme.

    `parts` has gate and up, or gate_up, and down; and the same with `_bias` where experts have
    biases. `model_types` restricts the row to these values of config.json's model_type, for schemes
    that names and shapes cannot tell apart.
    """

    name: str
    parts: Mapping[str, Stored]
    model_types: tuple[str, ...] = ()


def _per_expert(name: str, where: str, gate: str, up: str, down: str) -> Family:
    return Family(
        name,
        {
            "gate": Stored(f"{where}.{gate}.weight", "I H"),
            "up": Stored(f"{where}.{up}.weight", "I H"),
            "down": Stored(f"{where}.{down}.weight", "H I"),
        },
    )


# In order of trial. Rows with model_types come before rows that read the same names otherwise.
FAMILIES = (
    # Qwen2/3/3.5-MoE, DeepSeek V2/V3/V3.2, Kimi-K2, GLM-4.5 and later, MiniMax by transformers 5
    _per_expert("per-expert", "mlp.experts.{e}", "gate_proj", "up_proj", "down_proj"),
    # Mixtral, MiniMax M2
    _per_expert("mixtral", "block_sparse_moe.experts.{e}", "w1", "w3", "w2"),
    # DeepSeek-V4
    _per_expert("deepseek-v4", "ffn.experts.{e}", "w1", "w3", "w2"),
    # Mistral's own names
    _per_expert("mistral", "experts.{e}", "w1", "w3", "w2"),
    Family(
        "gpt-oss",
        {
            "gate_up": Stored("mlp.experts.gate_up_proj", "E H I2"),
            "gate_up_bias": Stored("mlp.experts.gate_up_proj_bias", "E I2"),
            "down": Stored("mlp.experts.down_proj", "E I H"),
            "down_bias": Stored("mlp.experts.down_proj_bias", "E H"),
        },
        model_types=("gpt_oss",),
    ),
    # Qwen3.5-MoE, and what transformers 5 keeps in memory
    Family(
        "fused",
        {
            "gate_up": Stored("mlp.experts.gate_up_proj", "E 2I H"),
            "down": Stored("mlp.experts.down_proj", "E H I"),
        },
    ),
    # Qwen3-VL-MoE
    Family(
        "fused-transposed",
        {
            "gate_up": Stored("mlp.experts.gate_up_proj", "E H 2I"),
            "down": Stored("mlp.experts.down_proj", "E I H"),
        },
    ),
)
