"""What config.json says about the routed experts: sizes, activation function, quantisation."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ktk.checkpoint.entries import (
    MOST_JSON,
    EntryError,
    integer,
    items,
    number,
    parse_object,
    text,
)
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
    # transformers has the same formula under two names.
    "gelu_new": "gelu_tanh",
}

# What no choice of an activation makes right.
_REFUSED = {
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "multiplies what goes into an expert by its routing weight; ktk multiplies what comes out",
    ),
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

    def __post_init__(self) -> None:
        if self.num_experts_per_tok > self.num_experts:
            chosen, there = self.num_experts_per_tok, self.num_experts
            raise EntryError(f"{chosen} experts per token are more than the {there} that there are")

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
                f"model type {self.model_type!r} uses the activation {self.activation!r}, and ktk "
                f"computes {', '.join(sorted(set(_ACTIVATIONS.values())))} only: its experts would "
                "not be those of this model"
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
    entries = read_json(path)
    for name in _NESTED:
        inner = entries.get(name)
        entries = {**entries, **inner} if isinstance(inner, dict) else entries
    try:
        return _config(entries)
    except EntryError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _config(entries: dict[str, Any]) -> ExpertConfig:
    model_type = text("model_type", entries.get("model_type", "unknown"))
    if reason := refusal(model_type):
        raise EntryError(reason)
    sizes: dict[str, Any] = {field: _size(entries, field) for field in _NAMES}
    layers = entries.get("num_hidden_layers")
    return ExpertConfig(
        model_type=model_type,
        num_layers=None if layers is None else integer("num_hidden_layers", layers),
        **sizes,
        **_activation(entries),
        quantization=read_quantization(entries),
    )


def refusal(model_type: str) -> str:
    """Return why a model's experts are others than ktk computes; empty if they are not."""
    reason = _REFUSED.get(model_type)
    return f"the model type {model_type!r} {reason}" if reason else ""


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


def _size(entries: dict[str, Any], field: str) -> int:
    for name in _NAMES[field]:
        value = entries.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value:
            # Hunyuan has an entry per layer.
            if any(one != value[0] for one in value):
                raise EntryError(f"{name} is {value}; ktk reads models whose experts are all alike")
            value = value[0]
        return integer(name, value, least=1)
    raise EntryError(f"it has none of {', '.join(_NAMES[field])}: not an MoE model?")


def _activation(entries: dict[str, Any]) -> dict[str, Any]:
    named = entries.get("hidden_act") or entries.get("hidden_activation") or "silu"
    name = text("hidden_act", named)
    for key in _LIMITS_OF_LAYERS:
        if any(items(key, entries.get(key) or [])):
            name = f"{name}, then clamped as {key} says"
    limit, alpha = (
        None if value is None else number(key, value)
        for key in ("swiglu_limit", "swiglu_alpha")
        for value in [entries.get(key)]
    )
    if entries.get("model_type") == "gpt_oss" or name == "swigluoai" or alpha is not None:
        return {
            "activation": "swigluoai",
            "activation_limit": _OAI_LIMIT if limit is None else limit,
            "activation_alpha": _OAI_ALPHA if alpha is None else alpha,
        }
    return {"activation": name, "activation_limit": limit}
