"""How experts name and lay out their weights: one row for each way.

A row maps the parts of an expert to tensors. What their names begin with, the layer and the module
that has the experts, is found (`locations`); `{e}` stands for the expert. Axes are written in the
order they are stored:

    E   experts (a fused tensor; without it there is a tensor per expert)
    EI  experts and intermediate size in one axis: all rows of expert 0, then all of expert 1, ...
    H   hidden size
    I   intermediate size
    2I  gate and up in one axis: all rows of gate, then all rows of up
    I2  gate and up in one axis, alternating: gate 0, up 0, gate 1, up 1, ...

Two things stand in no row. Experts without a gate are named as those that have one, without its
names (`families`). Biases are named after their matrices (`Stored.bias`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Stored:
    """A tensor of the checkpoint: what its name ends with, and its axes.

    They are those of weights that are stored as floats. Quantised ones are several tensors, whose
    names begin with `stem` and whose shapes `storage` knows.
    """

    name: str
    axes: str

    @cached_property
    def stem(self) -> str:
        """The name of the matrix."""
        return self.name if self.fused else self.name.removesuffix(".weight")

    @cached_property
    def fused(self) -> bool:
        """Whether all experts share this tensor."""
        return self.axes.startswith("E")

    @property
    def joined(self) -> bool:
        """Whether experts that share this tensor have no axis of their own."""
        return self.axes.startswith("EI")

    @property
    def own(self) -> list[str]:
        """The axes of one expert."""
        axes = self.axes.split()
        return ["I", *axes[1:]] if self.joined else axes[self.fused :]

    def bias(self, depth: str) -> Stored:
        """Return the bias of a matrix; `depth` is the axis that its products run along."""
        stem = self.name.removesuffix(".weight")
        name = f"{stem}_bias" if self.name == stem else f"{stem}.bias"
        axes = [axis for axis in self.own if axis != depth]
        return Stored(name, " ".join(["E", *axes] if self.fused else axes))


@dataclass(frozen=True)
class Family:
    """A way to name and lay out experts.

    `parts` has gate and up, or gate_up, and down, or no gate; and the same with `_bias` where
    experts turn out to have biases. `model_types` restricts the row to these values of
    config.json's model_type, for ways that names and shapes cannot tell apart. `models` says for
    people who uses it, in docs/checkpoints.md.
    """

    name: str
    models: str
    parts: Mapping[str, Stored]
    model_types: tuple[str, ...] = ()


def _per_expert(name: str, models: str, **parts: str) -> Family:
    axes = {part: "H I" if part == "down" else "I H" for part in parts}
    return Family(
        name,
        models,
        {part: Stored(f"experts.{one}.weight", axes[part]) for part, one in parts.items()},
    )


def _shared(
    name: str, models: str, model_types: tuple[str, ...] = (), **parts: tuple[str, str]
) -> Family:
    return Family(name, models, {part: Stored(*one) for part, one in parts.items()}, model_types)


# In order of trial. Rows with model_types come before rows that read the same names otherwise.
FAMILIES = (
    _per_expert(
        "per-expert",
        "Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3-Omni, Qwen3.5-MoE, DeepSeek V2, V3, V3.2, "
        "Kimi-K2, K2-Thinking, K2.5, GLM-4.5 to 5.3, OLMoE, Ernie-4.5, dots1, Hunyuan-A13B, Hy3, "
        "MiMo-V2, AFMoE, EXAONE-MoE, LongCat-Flash, Ling, Jamba, Nemotron-H, Nemotron-3 and most "
        "others",
        gate="{e}.gate_proj",
        up="{e}.up_proj",
        down="{e}.down_proj",
    ),
    _per_expert(
        "mixtral",
        "Mixtral, MiniMax-Text-01, M2, M3, Phi-3.5-MoE, Kimi-Linear, Kimi-K3, LFM2-MoE, "
        "DeepSeek-V4, V4.1, Mistral's own files, Mistral-Large-4",
        gate="{e}.w1",
        up="{e}.w3",
        down="{e}.w2",
    ),
    _shared(
        "gpt-oss",
        "gpt-oss",
        ("gpt_oss",),
        gate_up=("experts.gate_up_proj", "E H I2"),
        down=("experts.down_proj", "E I H"),
    ),
    _shared(
        "fused",
        "Qwen3.5-MoE, Mistral-4, Hy4, Gemma-4, DiffusionGemma, Zaya, Granite SWA, and what "
        "transformers 5 keeps in memory",
        gate_up=("experts.gate_up_proj", "E 2I H"),
        down=("experts.down_proj", "E H I"),
    ),
    # No sizes fit this row and the one above: that would take H = 2I and H = I.
    _shared(
        "fused-transposed",
        "Qwen3-VL-MoE, Llama-4, OpenAI's privacy filter",
        gate_up=("experts.gate_up_proj", "E H 2I"),
        down=("experts.down_proj", "E I H"),
    ),
    _shared(
        "stacked",
        "Nemotron-H and Nemotron-3, as transformers 5 keeps them in memory",
        gate=("experts.gate_proj", "E I H"),
        up=("experts.up_proj", "E I H"),
        down=("experts.down_proj", "E H I"),
    ),
    _shared(
        "step",
        "Step-3.5, Step-3.7",
        gate=("moe.gate_proj.weight", "E I H"),
        up=("moe.up_proj.weight", "E I H"),
        down=("moe.down_proj.weight", "E H I"),
    ),
    _shared(
        "inkling",
        "Inkling, Inkling-2",
        gate_up=("experts.w13_weight", "E I2 H"),
        down=("experts.w2_weight", "E H I"),
    ),
    _shared(
        "dbrx",
        "DBRX",
        gate=("experts.mlp.w1", "EI H"),
        up=("experts.mlp.v1", "EI H"),
        down=("experts.mlp.w2", "EI H"),
    ),
    _shared(
        "granite",
        "Granite 3 and 4, JetMoe",
        gate_up=("input_linear.weight", "E 2I H"),
        down=("output_linear.weight", "E H I"),
    ),
    _shared(
        "aria",
        "Aria",
        gate_up=("experts.fc1.weight", "E H 2I"),
        down=("experts.fc2.weight", "E I H"),
    ),
    _per_expert("smallthinker", "SmallThinker", gate="{e}.gate", up="{e}.up", down="{e}.down"),
    _per_expert("switch", "Switch Transformers", up="expert_{e}.wi", down="expert_{e}.wo"),
    _per_expert("nllb", "NLLB-MoE", up="expert_{e}.fc1", down="expert_{e}.fc2"),
)


def families(*, gated: bool) -> Iterator[Family]:
    """Yield the ways of experts that have a gate, or of those that have none."""
    for family in FAMILIES:
        if gated and ("gate" in family.parts or "gate_up" in family.parts):
            yield family
        if not gated and "gate_up" not in family.parts:
            parts = {part: one for part, one in family.parts.items() if part != "gate"}
            yield replace(family, parts=parts)
