"""What transformers does not read from the metadata of a GGUF file, or reads wrong, of a model's
configuration: RoPE that is stretched for long contexts, and widths of experts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

import transformers
from transformers.utils.hub import cached_file

from ktk.errors import CheckpointError
from ktk.transformers.gguf_metadata import metadata_of

# Of transformers' configurations, by the key that llama.cpp has for them.
_WIDTHS = {
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
# Parameters of YaRN: transformers' names, by llama.cpp's.
_YARN = {
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# Parameters of RoPE that are not about how far it is stretched.
_OF_ANY_LENGTH = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


def config_of(name: str, gguf_file: str, **hub: Any) -> Any:
    """Return the configuration of a model, completed from its GGUF file.

    Parameters
    ----------
    name, gguf_file
        Where the file is, as `from_pretrained` takes them: in a folder or a repository.
    **hub
        Further options of `from_pretrained` that say where, such as revision and subfolder.

    Raises
    ------
    CheckpointError
        The file wants a kind of RoPE that is not read here.
    """
    config = transformers.AutoConfig.from_pretrained(name, gguf_file=gguf_file, **hub)
    path: Any = cached_file(name, gguf_file, **hub)
    metadata = metadata_of(path)
    architecture = metadata["general.architecture"]
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    text = config.get_text_config(decoder=True)
    for key, attribute in _WIDTHS.items():
        if isinstance(own.get(key), int) and hasattr(text, attribute):
            setattr(text, attribute, own[key])
    if scaling := _rope(path, own):
        text.rope_parameters = _stretched(text.rope_parameters, scaling)
    return config


def _stretched(known: dict[str, Any], scaling: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE's parameters with others for its length."""
    if (full := known.get("full_attention")) is not None:  # by kind of layer: sliding ones stay
        return {**known, "full_attention": _stretched(full, scaling)}
    # What the file does not say, such as gpt-oss' `truncate`, stays where the kind is the same.
    if known.get("rope_type") != scaling["rope_type"]:
        known = {name: known[name] for name in _OF_ANY_LENGTH if name in known}
    return {**known, **scaling}


def _rope(path: str | os.PathLike[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return how RoPE is stretched, in transformers' words; empty if it is not.

    As llama.cpp reads these keys: a factor without a type is a linear one, and the factor of
    attention is one beside what YaRN has anyway, 1 + ln(factor) / 10.
    """
    prefix = "rope.scaling."
    found = {
        name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)
    }
    factor = found.get("factor", 0)
    kind = found.get("type", "linear" if factor else "none")
    if kind == "none" or (kind in ("linear", "yarn") and factor in (0, 1)):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": float(factor)}
    if kind != "yarn":
        raise CheckpointError(
            f"{path} wants RoPE stretched by {kind!r}, and only linear and yarn are read from GGUF "
            "files: load the model's safetensors files instead"
        )
    scaling = {"rope_type": "yarn", "factor": float(factor)}
    scaling |= {name: found[key] for key, name in _YARN.items() if key in found}
    if found.get("attn_factor", 1) != 1:
        scaling["attention_factor"] = found["attn_factor"] * (1 + 0.1 * math.log(factor))
    return scaling
