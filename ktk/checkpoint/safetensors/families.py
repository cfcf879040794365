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
    # Models of several modalities
    "model.language_model.layers.{L}.",
    "language_model.model.layers.{L}.",
    "thinker.model.layers.{L}.",  # Qwen3-Omni
    "backbone.layers.{L}.",  # Nemotron-H
    "language_model.model.blocks.{L}.",  # Kimi-K2.5, as transformers 5.23 writes it
    # DeepSeek's and Mistral's own names
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
        return self.name if self.fused else self.name.removesuffix(".weight")

    @property
    def fused(self) -> bool:
        """Whether all experts share this tensor."""
        return self.axes.split()[0] == "E"


@dataclass(frozen=True)
class Family:
    """A naming scheme.

    `parts` has gate and up, or gate_up, and down, or no gate; and the same with `_bias` where
    experts have biases. `model_types` restricts the row to these values of config.json's
    model_type, for schemes that names and shapes cannot tell apart. `models` says for people who
    uses it, in docs/checkpoints.md.
    """

    name: str
    models: str
    parts: Mapping[str, Stored]
    model_types: tuple[str, ...] = ()


def _per_expert(name: str, models: str, where: str, gate: str, up: str, down: str) -> Family:
    return Family(
        name,
        models,
        {
            "gate": Stored(f"{where}.{gate}.weight", "I H"),
            "up": Stored(f"{where}.{up}.weight", "I H"),
            "down": Stored(f"{where}.{down}.weight", "H I"),
        },
    )


def _fused(name: str, models: str, gate_up: tuple[str, str], down: tuple[str, str]) -> Family:
    return Family(name, models, {"gate_up": Stored(*gate_up), "down": Stored(*down)})


# In order of trial. Rows with model_types come before rows that read the same names otherwise.
FAMILIES = (
    _per_expert(
        "per-expert",
        "Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, DeepSeek V2, V3, V3.2, Kimi-K2, "
        "K2-Thinking, K2.5, GLM-4.5 to 5, OLMoE, Ernie-4.5, dots1, Hunyuan-A13B, Hy3, MiMo-V2, "
        "AFMoE, EXAONE-MoE, LongCat-Flash, Ling and most others",
        *("mlp.experts.{e}", "gate_proj", "up_proj", "down_proj"),
    ),
    _per_expert(
        "mixtral",
        "Mixtral, MiniMax-Text-01, M2, M3, Phi-3.5-MoE, Kimi-Linear",
        *("block_sparse_moe.experts.{e}", "w1", "w3", "w2"),
    ),
    _per_expert("deepseek-v4", "DeepSeek-V4", "ffn.experts.{e}", "w1", "w3", "w2"),
    _per_expert("mistral", "Mistral's own files", "experts.{e}", "w1", "w3", "w2"),
    _per_expert(
        *("jamba", "Jamba", "feed_forward.experts.{e}", "gate_proj", "up_proj", "down_proj"),
    ),
    _per_expert("lfm2", "LFM2-MoE", "feed_forward.experts.{e}", "w1", "w3", "w2"),
    Family(
        "gpt-oss",
        "gpt-oss",
        {
            "gate_up": Stored("mlp.experts.gate_up_proj", "E H I2"),
            "gate_up_bias": Stored("mlp.experts.gate_up_proj_bias", "E I2"),
            "down": Stored("mlp.experts.down_proj", "E I H"),
            "down_bias": Stored("mlp.experts.down_proj_bias", "E H"),
        },
        model_types=("gpt_oss",),
    ),
    _fused(
        "fused",
        "Qwen3.5-MoE, Mistral-4, Hy4, and what transformers 5 keeps in memory",
        ("mlp.experts.gate_up_proj", "E 2I H"),
        ("mlp.experts.down_proj", "E H I"),
    ),
    # No sizes fit this row and the one above: that would take H = 2I and H = I.
    _fused(
        "fused-transposed",
        "Qwen3-VL-MoE",
        ("mlp.experts.gate_up_proj", "E H 2I"),
        ("mlp.experts.down_proj", "E I H"),
    ),
    _fused(
        "granite",
        "Granite 3 and 4",
        ("block_sparse_moe.input_linear.weight", "E 2I H"),
        ("block_sparse_moe.output_linear.weight", "E H I"),
    ),
    _fused(
        "gemma4",
        "Gemma-4",
        ("experts.gate_up_proj", "E 2I H"),
        ("experts.down_proj", "E H I"),
    ),
    _fused(
        "llama4",
        "Llama-4",
        ("feed_forward.experts.gate_up_proj", "E H 2I"),
        ("feed_forward.experts.down_proj", "E I H"),
    ),
    _fused(
        "aria",
        "Aria",
        ("mlp.experts.fc1.weight", "E H 2I"),
        ("mlp.experts.fc2.weight", "E I H"),
    ),
    # Without a gate: as published, and as transformers 5 keeps them in memory
    Family(
        "nemotron",
        "Nemotron-H, Nemotron-3",
        {
            "up": Stored("mixer.experts.{e}.up_proj.weight", "I H"),
            "down": Stored("mixer.experts.{e}.down_proj.weight", "H I"),
        },
        model_types=("nemotron_h",),
    ),
    Family(
        "nemotron-fused",
        "Nemotron-H, Nemotron-3",
        {
            "up": Stored("mixer.experts.up_proj", "E I H"),
            "down": Stored("mixer.experts.down_proj", "E H I"),
        },
        model_types=("nemotron_h",),
    ),
)
