"""What a GGUF file's metadata says about its experts: sizes and activation function.

The file names an architecture, and programs know what that computes. The names and functions are
those of llama.cpp (src/llama-arch.cpp, src/models/), which makes most of the files. Of an
architecture that is not among them somebody has to say the activation function; the tensors say
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import Keys

from ktk.checkpoint.config import UNKNOWN, WEIGHT_ON_INPUT, ExpertConfig, limits_hold, refusal
from ktk.checkpoint.entries import EntryError, integer, number
from ktk.config import activation_called
from ktk.errors import CheckpointError

_SILU = (
    *("afmoe", "arctic", "bailingmoe", "bailingmoe2", "bailingmoe3", "cohere2moe", "dbrx", "deci"),
    *("deepseek", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "dots1", "dots3note"),
    *("ernie4_5-moe", "exaone-moe", "glm-dsa", "glm4moe", "glm5-next", "granite", "granitehybrid"),
    *("granitemoe", "granite_swa", "grovemoe", "hunyuan-moe", "hy_v3", "hy_v4", "jamba"),
    *("kimi-linear", "laguna", "lfm2moe", "llada-moe", "llama", "llama-embed", "llama4", "maple"),
    *("mellum", "mimo2", "minicpm", "minimax-01", "minimax-m2", "mistral3", "mistral4", "olmoe"),
    *("phimoe", "qwen2moe", "qwen35moe", "qwen3moe", "qwen3next", "qwen3vlmoe", "qwen4exp"),
    *("rnd1", "step35"),
)
# In the words of config.json; one that `ktk.config` does not know is refused with its name.
ACTIVATIONS = {
    **dict.fromkeys(_SILU, "silu"),
    "gemma4": "gelu_pytorch_tanh",
    "gpt-oss": "swigluoai",
    "grok": "gelu_pytorch_tanh",
    "kimi-k3": "situ",
    "minimax-m3": "swigluoai",
    "nemotron_h_moe": "relu2",
    "nomic-bert-moe": "gelu",
    "smallthinker": "relu",
}
# Whose experts have no gate.
_UNGATED = ("nemotron_h_moe", "nomic-bert-moe")
# The width of experts where it is not that of the model, which projects what goes in and comes out.
_LATENT = ("{arch}.moe_latent_size", "{arch}.expert_latent_length")
# The sizes that Kimi-K3 keeps gate and up below.
_SOFTCAPS = {
    "gate_softcap": "{arch}.activation.situ_beta",
    "up_softcap": "{arch}.activation.situ_linear_beta",
}
# The metadata lacks the clamp of swigluoai; it is 7 in all models that have it.
_OAI_LIMIT = 7.0
# Younger than the oldest gguf package that will do.
_CLAMP = "{arch}.swiglu_clamp_exp"
# The clamp of models whose first files lack the entry.
_CLAMP_OF_OLD_FILES = {"maple": 7.0}
# Layers at the end that predict further tokens.
_PREDICTING = "{arch}.nextn_predict_layers"
# With a clamp, these apply it before SiLU; others clamp what SiLU returns.
_CLAMPED_BEFORE = ("deepseek4", "glm5-next", "hy_v4", "maple")


class Metadata:
    """The entries about experts.

    Parameters
    ----------
    path
        Of the file.
    fields
        Its metadata.
    activation, top_k
        What holds in the place of what the metadata says, or of what nobody knows.
    """

    def __init__(
        self,
        path: Path,
        fields: Mapping[str, Any],
        activation: str | None = None,
        top_k: int | None = None,
    ) -> None:
        self._path = path
        self._fields = fields
        name = fields.get(Keys.General.ARCHITECTURE)
        if not isinstance(name, str):
            raise CheckpointError(f"{path} has no {Keys.General.ARCHITECTURE} in its metadata")
        if reason := refusal(name):
            raise CheckpointError(f"{path}: {reason}")
        self.architecture = name
        # Whether the activation function and the gate follow from the name.
        self.known = name in ACTIVATIONS
        self.ungated = name in _UNGATED
        self._activation = activation
        # Said by metadata, of architectures that ktk knows.
        self.num_experts()
        self.hidden_size()
        self._top_k = top_k or self._size(Keys.LLM.EXPERT_USED_COUNT, needed=True) or 0

    def num_experts(self) -> int | None:
        """Return how many experts a layer has; None where tensors alone say it."""
        return self._size(Keys.LLM.EXPERT_COUNT, needed=self.known)

    def hidden_size(self) -> int | None:
        """Return the width of what goes into experts; None where tensors alone say it."""
        keys = (key for key in _LATENT if self._fields.get(key.format(arch=self.architecture)))
        return self._size(next(keys, Keys.LLM.EMBEDDING_LENGTH), needed=self.known)

    def intermediate_size(self, layer: int) -> int | None:
        """Return what the metadata says of a layer's experts; some files do not."""
        value = self._of_layer(Keys.LLM.EXPERT_FEED_FORWARD_LENGTH, layer)
        return int(value) if value else None

    def config(
        self, layer: int, num_experts: int, hidden_size: int, intermediate_size: int, *, gated: bool
    ) -> ExpertConfig:
        """Describe the experts of a layer."""
        own = _called(ACTIVATIONS.get(self.architecture, UNKNOWN))
        activation = _called(self._activation or own)
        limit = self._of_layer(_CLAMP, layer, _CLAMP_OF_OLD_FILES.get(self.architecture, 0)) or None
        if not limits_hold(own, activation):
            limit = None
        if activation == "swigluoai":
            limit = _OAI_LIMIT
        elif limit and activation == "silu" and self.architecture not in _CLAMPED_BEFORE:
            activation = "swiglustep"
        caps: dict[str, Any] = {
            name: self._of_layer(key, layer) or None
            for name, key in _SOFTCAPS.items()
            if activation == "situ"
        }
        try:
            return ExpertConfig(
                model_type=self.architecture,
                num_experts=num_experts,
                num_experts_per_tok=self._top_k,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                activation=activation,
                activation_limit=limit,
                **caps,
                gated=gated,
                apply_router_weight_on_input=self.architecture in WEIGHT_ON_INPUT,
                num_layers=self._num_layers(),
                model_hidden_size=self._size(Keys.LLM.EMBEDDING_LENGTH, needed=False),
            )
        except EntryError as error:
            raise CheckpointError(f"{self._path}: {error}") from None

    def _num_layers(self) -> int | None:
        count = self._fields.get(Keys.LLM.BLOCK_COUNT.format(arch=self.architecture))
        predicting = self._fields.get(_PREDICTING.format(arch=self.architecture), 0)
        if not isinstance(count, int) or not isinstance(predicting, int):
            return None
        return count - predicting

    def _size(self, key: str, *, needed: bool) -> int | None:
        """Return a size; None where an architecture that ktk does not know need not say it."""
        name = key.format(arch=self.architecture)
        value = self._fields.get(name)
        if value is None and not needed:
            return None
        if value is None:
            how = "" if self.known else "; if it is one, say it, by top_k= (--top-k)"
            raise CheckpointError(
                f"{self._path} has no {name} in its metadata: not an MoE model?{how}"
            )
        try:
            return integer(name, value, least=1)
        except EntryError as error:
            raise CheckpointError(f"{self._path}: {error}") from None

    def _of_layer(self, key: str, layer: int, default: float = 0) -> float:
        """Return an entry that may differ between layers; 0 where a list is too short."""
        name = key.format(arch=self.architecture)
        value = self._fields.get(name, default)
        if isinstance(value, np.ndarray):
            value = value[layer].item() if layer < len(value) else 0
        try:
            return number(name, value)
        except EntryError as error:
            raise CheckpointError(f"{self._path}: {error}") from None


def _called(name: str) -> str:
    return activation_called(name) or name
