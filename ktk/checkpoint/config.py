"""What config.json says about the routed experts: sizes, activation function, quantisation."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ktk.checkpoint.entries import EntryError, integer, items, number, text
from ktk.checkpoint.files import read_json
from ktk.checkpoint.quantization import Quantization, read_quantization
from ktk.config import ACTIVATIONS, SIZES, MoEConfig, activation_called
from ktk.errors import CheckpointError

# Where models of several modalities keep the language model's entries, outermost first.
_NESTED = ("thinker_config", "text_config", "llm_config", "language_config", "ffn_config")

_MODEL_HIDDEN_SIZE = ("d_model", "hidden_size")
# The first name that is present counts. `intermediate_size` is the dense layers' size in models
# that also have the other one.
_NAMES = {
    "num_experts": (
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "moe_num_primary_experts",
    ),
    "num_experts_per_tok": (
        *("num_experts_per_tok", "num_experts_per_token"),
        *("moe_topk", "moe_top_k", "moe_k", "top_k_experts", "moe_num_active_primary_experts"),
    ),
    # Of the experts: models with a latent width project what goes into them and comes out.
    "hidden_size": ("moe_latent_size", "routed_expert_hidden_size", *_MODEL_HIDDEN_SIZE),
    "intermediate_size": (
        *("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
        *("intermediate_size", "ffn_hidden_size", "d_ff", "encoder_ffn_dim"),
    ),
}
# Of models whose config.json does not say it.
_TOP_K = {"nllb-moe": 2, "switch_transformers": 1}
_ACTIVATION = {"smallthinker": "relu"}

# The activation of which nobody says what it is.
UNKNOWN = "unknown"

# What no choice of an activation makes right.
REFUSED = {
    **dict.fromkeys(
        ("muse_spark", "muse_spark_text"),
        "normalises what an expert returns, and ktk adds it up as it is",
    ),
}

# Whose experts have no gate, and whose get tokens that are multiplied by their routing weights;
# config.json does not say so.
_UNGATED = ("nemotron_h", "nllb-moe", "switch_transformers")
WEIGHT_ON_INPUT = ("llama4", "llama4_text")

# Clamps of what SiLU returns, for some layers: Ling 3.0, Step 3.7.
_LIMITS_OF_LAYERS = ("expert_swiglu_limit_list", "swiglu_limits")
_LIMIT = "swiglu_limit"
_ALPHA = "swiglu_alpha"

# Of gate and up: Inkling-2, whose hidden_act says silu, and Kimi-K3, whose says situ and which may
# do without the one of up.
_SOFTCAPS = ("mlp_gate_softcap", "mlp_up_softcap")
_SITU = ("activation_situ_beta", "activation_situ_linear_beta")

# gpt-oss published its weights before transformers wrote these two into config.json.
_OAI_ALPHA = 1.702
_OAI_LIMIT = 7.0


@dataclass(frozen=True, kw_only=True)
class ExpertConfig(MoEConfig):
    """The routed experts of one model: a layer's configuration, and what else a checkpoint says.

    `activation` may be a name that ktk does not know; `layer` refuses it. `num_layers` is what the
    model runs, where it says so: layers after these predict further tokens (MTP). `limits` has the
    clamp of each layer where layers differ, 0 for none; `of_layer` takes them into account.
    `model_hidden_size` is the width of the model where its experts have another, `hidden_size`.
    """

    model_type: str
    quantization: Quantization = field(default_factory=Quantization)
    num_layers: int | None = None
    limits: tuple[float, ...] = ()
    model_hidden_size: int | None = None

    def __post_init__(self) -> None:
        known = activation_called(self.activation)
        object.__setattr__(self, "activation", known or self.activation)
        if self.model_hidden_size == self.hidden_size:
            object.__setattr__(self, "model_hidden_size", None)
        try:
            super().__post_init__()
        except ValueError as error:
            raise EntryError(str(error)) from None

    def _check_activation(self) -> None:
        """Take any name: a checkpoint may be looked at that cannot be computed."""

    def of_layer(self, number: int) -> ExpertConfig:
        """Return what the experts of one layer are."""
        if not self.limits:
            return self
        limit = self.limits[number] if number < len(self.limits) else 0
        if not limit:
            return replace(self, limits=())
        return replace(self, limits=(), activation="swiglustep", activation_limit=limit)

    def layer(self, wanted: MoEConfig | None = None, *, mapped: bool = False) -> MoEConfig:
        """Return what a layer is made with.

        Parameters
        ----------
        wanted
            What the user wants instead of the checkpoint's own: another activation function. The
            sizes, and the number of zero experts, have to be the checkpoint's.
        mapped
            Slots are filled by a map, so there may be more or fewer than experts.

        Raises
        ------
        CheckpointError
            ktk does not compute the activation function.
        ValueError
            `wanted` has other sizes.
        """
        config = wanted or self
        for name in (*SIZES, "zero_expert_num"):
            mine, asked = getattr(self, name), getattr(config, name)
            if asked != mine and not (mapped and name == "num_experts"):
                raise ValueError(
                    f"the checkpoint has {name} {mine}, but {asked} is asked for: is it of another "
                    "model?"
                )
        if config.activation == UNKNOWN:
            raise CheckpointError(
                f"ktk does not know which activation function model type {self.model_type!r} has: "
                "say it, by activation= (--activation)"
            )
        if config.activation not in ACTIVATIONS:
            raise CheckpointError(
                f"model type {self.model_type!r} uses the activation {config.activation!r}, and "
                f"ktk computes {', '.join(sorted(ACTIVATIONS))} only: its experts would not be "
                "those of this model"
            )
        return MoEConfig(**{one.name: getattr(config, one.name) for one in fields(MoEConfig)})


def widths_differ(experts: int, model: int) -> str:
    """Say that experts have another width than their model, and what that means."""
    return f"experts are {experts} wide, the model {model}: the caller projects"


def read_config(
    folder: Path, module: str | None = None, activation: str | None = None
) -> ExpertConfig:
    """Read `folder`/config.json.

    Parameters
    ----------
    folder
        Of the checkpoint.
    module
        What has the experts, if not the language model: its entries are those that count.
    activation
        The activation function, if not what it says: what it says of that, limits and so on, does
        not hold for another.

    Raises
    ------
    CheckpointError
        It is missing, unreadable, or describes no routed experts.
    """
    path = folder / "config.json"
    entries = entries_of(read_json(path), module)
    try:
        return _config(entries, activation)
    except EntryError as error:
        raise CheckpointError(f"{path}: {error}") from error


def entries_of(entries: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    """Return what config.json says of the language model, or of a module, and of all of them.

    The innermost entry counts; those that are null say nothing.
    """
    for name in _nested(module):
        inner = entries.get(name)
        if isinstance(inner, dict):
            # That of DBRX's experts is empty.
            kind = inner.get("model_type") or entries.get("model_type")
            said = {key: value for key, value in inner.items() if value is not None}
            entries = {**entries, **said} | ({} if kind is None else {"model_type": kind})
    return entries


def _nested(module: str | None) -> tuple[str, ...]:
    """Return which entries of entries count, outermost first."""
    if module is None:
        return _NESTED
    own = [f"{word}_config" for word in re.split(r"[._]", module)]
    return (*own, *_NESTED[1:])


def _config(entries: dict[str, Any], activation: str | None) -> ExpertConfig:
    model_type = text("model_type", entries.get("model_type", "unknown"))
    if reason := refusal(model_type):
        raise EntryError(reason)
    entries = {"num_experts_per_tok": _TOP_K.get(model_type)} | entries
    sizes: dict[str, Any] = {field: _size(entries, names) for field, names in _NAMES.items()}
    if any(entries.get(name) is not None for name in _MODEL_HIDDEN_SIZE):
        sizes["model_hidden_size"] = _size(entries, _MODEL_HIDDEN_SIZE)
    layers = entries.get("num_hidden_layers")
    return ExpertConfig(
        model_type=model_type,
        num_layers=None if layers is None else integer("num_hidden_layers", layers),
        **sizes,
        **_activation(entries if activation is None else _with_activation(entries, activation)),
        gated=model_type not in _UNGATED,
        apply_router_weight_on_input=model_type in WEIGHT_ON_INPUT,
        zero_expert_num=_zero_experts(entries),
        quantization=read_quantization(entries),
    )


def refusal(model_type: str) -> str:
    """Return why a model's experts are others than ktk computes; empty if they are not."""
    reason = REFUSED.get(model_type)
    return f"the model type {model_type!r} {reason}" if reason else ""


def _size(entries: dict[str, Any], names: tuple[str, ...]) -> int:
    for name in names:
        value = entries.get(name)
        if value is None:
            continue
        if isinstance(value, list) and value:
            # Hunyuan has an entry per layer.
            if any(one != value[0] for one in value):
                raise EntryError(f"{name} is {value}; ktk reads models whose experts are all alike")
            value = value[0]
        return integer(name, value, least=1)
    raise EntryError(f"it has none of {', '.join(names)}: not an MoE model?")


def _zero_experts(entries: dict[str, Any]) -> int:
    """Return how many experts beside those with weights return what goes in: LongCat-Flash."""
    count = integer("zero_expert_num", entries.get("zero_expert_num") or 0)
    # Meituan's own configurations have a type, and those that transformers writes have none.
    kind = entries.get("zero_expert_type") or "identity"
    if count and kind != "identity":
        raise EntryError(
            f"zero_expert_type is {kind!r}, and ktk computes zero experts of type 'identity' only, "
            "which return what goes in"
        )
    return count


def _activation(entries: dict[str, Any]) -> dict[str, Any]:
    name = _function(entries)
    limits = _limits(entries)
    if limits and name == "silu":
        return {"activation": name, "limits": limits}
    if name == "situ":
        softcapped = entries.get(_SOFTCAPS[0]) is not None
        of_gate, of_up = _SOFTCAPS if softcapped else _SITU
        cap = entries.get(of_up)
        return {
            "activation": name,
            "gate_softcap": number(of_gate, entries.get(of_gate)),
            # Inkling-2 has one in any case: 25, where transformers finds no entry.
            "up_softcap": None if cap is None and not softcapped else number(of_up, cap),
        }
    limit, alpha = (
        None if value is None else number(key, value)
        for key in (_LIMIT, _ALPHA)
        for value in [entries.get(key)]
    )
    if name == "swigluoai":
        return {
            "activation": name,
            "activation_limit": _OAI_LIMIT if limit is None else limit,
            "activation_alpha": _OAI_ALPHA if alpha is None else alpha,
        }
    return {"activation": name, "activation_limit": limit}


def _function(entries: dict[str, Any]) -> str:
    """Return which activation function the entries mean, by ktk's name if it has one."""
    # Nemotron-H has an activation for experts and one for Mamba layers.
    names = (
        *("mlp_hidden_act", "hidden_act", "hidden_activation"),
        *("activation_function", "dense_act_fn", "ffn_act_fn"),
    )
    usual = _ACTIVATION.get(entries.get("model_type", ""), "silu")
    said = next(filter(None, map(entries.get, names)), usual)
    name = text("hidden_act", said.get("name") if isinstance(said, dict) else said)
    known = activation_called(name) or name
    if known == "silu" and _limits(entries):
        return known
    if entries.get(_SOFTCAPS[0]) is not None:
        return "situ"
    if known == "situ":
        return known
    if entries.get("model_type") == "gpt_oss" or entries.get(_ALPHA) is not None:
        return "swigluoai"
    return known


def _limits(entries: dict[str, Any]) -> tuple[float, ...]:
    """Return the clamp of each layer; nothing where none has one."""
    for key in _LIMITS_OF_LAYERS:
        limits = tuple(number(key, one or 0) for one in items(key, entries.get(key) or []))
        if any(limits):
            return limits
    return ()


def _with_activation(entries: dict[str, Any], activation: str) -> dict[str, Any]:
    """Return the entries that say what an activation is that somebody gives."""
    own, wanted = _function(entries), activation_called(activation) or activation
    if own == wanted:
        return entries
    kept = (*_SITU, *((_LIMIT, *_LIMITS_OF_LAYERS) if limits_hold(own, wanted) else ()))
    # An empty name by itself would say nothing, and is to be refused.
    return {key: entries[key] for key in kept if key in entries} | {"hidden_act": {"name": wanted}}


def limits_hold(own: str, wanted: str) -> bool:
    """Whether the clamps that files say for their activation hold for the one that is wanted.

    They do for that one, for what somebody says about a name that ktk does not know, and between
    SiLU and `swiglustep`, which is SiLU with its clamp elsewhere.
    """
    pair = {own, wanted}
    return own not in ACTIVATIONS or len(pair) == 1 or pair == {"silu", "swiglustep"}
