"""What transformers does not read from the metadata of a GGUF file, or reads wrong, of a model's
configuration: RoPE that is stretched for long contexts, and widths of experts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers

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


def config_of(folder: str, gguf_file: str, **options: Any) -> Any:
    """Return the configuration of a model, completed from its GGUF file.

    Parameters
    ----------
    folder, gguf_file
        Where the file is, as `from_pretrained` takes them.
    **options
        Of `AutoConfig.from_pretrained`.

    Raises
    ------
    CheckpointError
        The file wants a kind of RoPE that is not read here.
    """
    config = transformers.AutoConfig.from_pretrained(folder, gguf_file=gguf_file, **options)
    path = Path(folder, gguf_file)
    metadata = metadata_of(path)
    architecture = metadata["general.architecture"]
    own = {
        name.removeprefix(f"{architecture}."): value
        for name, value in metadata.items()
        if name.startswith(f"{architecture}.")
    }
    for key, name in _WIDTHS.items():
        if isinstance(own.get(key), int) and hasattr(config, name):
            setattr(config, name, own[key])
    if scaling := _rope(path, own):
        # What the file does not say, such as gpt-oss' `truncate`, stays where the kind is the same.
        known = config.rope_parameters
        same = known.get("rope_type") == scaling["rope_type"]
        base = known if same else {"rope_theta": known["rope_theta"]}
        config.rope_parameters = {**base, **scaling}
    return config


def _rope(path: str | os.PathLike[str], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return how RoPE is stretched, in transformers' words; empty if it is not.

    As llama.cpp reads it: a factor without a type is a linear one, and the factor of attention is
    one beside what YaRN has anyway, 1 + ln(factor) / 10.
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
