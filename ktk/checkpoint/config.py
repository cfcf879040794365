"""What config.json says about the routed experts: sizes, activation function, quantisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktk.checkpoint.entries import MOST_JSON, EntryError, parse_object
from ktk.checkpoint.files import File, MissingFile
from ktk.checkpoint.quantization import Quantization, read_quantization
from ktk.errors import CheckpointError

# Where models of several modalities keep the language model's entries, outermost first.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config")

# The first name that is present counts. `intermediate_size` is the dense layers' size in models
# that also have the other one.
_NAMES = {
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "num_experts_per_token"),
        *("moe_topk", "moe_top_k", "moe_k", "top_k_experts"),
    ),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "swigluoai": "swigluoai",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}

# Clamps of what SiLU returns, for some layers: Ling 3.0, Step 3.7.
_LIMITS_OF_LAYERS = ("expert_swiglu_limit_list", "swiglu_limits")

# gpt-oss published its weights before transformers wrote these two into config.json.
_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


@dataclass(frozen=True)
class ExpertConfig:
    """The routed experts of one model, in the words of `Backend.moe`.

    `activation` may be a name that ktk does not know; `arguments` refuses it. `num_layers` is what
    the model runs, where it says so: layers after these predict further tokens (MTP).
    """

    model_type: str
    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    activation_limit: float | None = None
    activation_alpha: float = _OAI_ALPHA
    quantization: Quantization = field(default_factory=Quantization)
    num_layers: int | None = None

    def arguments(self, **overrides: Any) -> dict[str, Any]:
        """Return keyword arguments for `Backend.moe`; `overrides` win over the activation's."""
        sizes = {name: getattr(self, name) for name in _NAMES}
        activation = {
            "activation": _ACTIVATIONS.get(self.activation),
            "activation_limit": self.activation_limit,
            "activation_alpha": self.activation_alpha,
        }
        fixed = sorted(sizes.keys() & overrides.keys())
        if fixed:
            raise TypeError(f"{', '.join(fixed)}: the checkpoint decides, it cannot be overridden")
        arguments = {**sizes, **activation, **overrides}
        if arguments["activation"] is None:
            raise CheckpointError(
                f"model type {self.model_type!r} uses the activation {self.activation!r}; ktk "
                f"knows {', '.join(sorted(set(_ACTIVATIONS)))}. Pass activation= to choose one"
            )
        return arguments


def read_config(folder: Path) -> ExpertConfig:
    """Read `folder`/config.json.

    Raises
    ------
    CheckpointError
        It is missing, unreadable, or describes no routed experts.
    """
    path = folder / "config.json"
    document = read_json(path)
    entries = document
    for name in _NESTED:
        inner = entries.get(name)
        entries = {**entries, **inner} if isinstance(inner, dict) else entries
    sizes: dict[str, Any] = {field: _size(path, entries, field) for field in _NAMES}
    layers = entries.get("num_hidden_layers")
    return ExpertConfig(
        model_type=str(entries.get("model_type", "unknown")),
        num_layers=layers if isinstance(layers, int) else None,
        **sizes,
        **_activation(entries),
        quantization=read_quantization(entries),
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object, or raise a `CheckpointError` that names the file."""
    try:
        file = File(path)
        if file.size > MOST_JSON:
            raise EntryError(f"it has {file.size} bytes, expected no more than {MOST_JSON}")
        return parse_object(file.read(0, file.size).tobytes())
    except MissingFile:
        raise CheckpointError(f"{path} is missing: not a checkpoint folder") from None
    except EntryError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def _size(path: Path, entries: dict[str, Any], field: str) -> int:
    for name in _NAMES[field]:
        value = entries.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value:
            # Hunyuan has an entry per layer.
            if any(one != value[0] for one in value):
                raise CheckpointError(
                    f"{path}: {name} is {value}; ktk reads models whose experts are all alike"
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{path}: {name} is {value!r}, expected a positive integer")
        return value
    raise CheckpointError(f"{path} has none of {', '.join(_NAMES[field])}: not an MoE model?")


def _activation(entries: dict[str, Any]) -> dict[str, Any]:
    name = str(entries.get("hidden_act") or entries.get("hidden_activation") or "silu")
    for key in _LIMITS_OF_LAYERS:
        if any(entries.get(key) or ()):
            name = f"{name}, then clamped as {key} says"
    limit = entries.get("swiglu_limit")
    alpha = entries.get("swiglu_alpha")
    if entries.get("model_type") == "gpt_oss" or name == "swigluoai" or alpha is not None:
        return {
            "activation": "swigluoai",
            "activation_limit": _OAI_LIMIT if limit is None else float(limit),
            "activation_alpha": _OAI_ALPHA if alpha is None else float(alpha),
        }
    return {"activation": name, "activation_limit": None if limit is None else float(limit)}
