"""What config.json says of a converted checkpoint, as compressed-tensors and its hosts read it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ktk.conversion.compressed.formats import Target

# Modules with no part of their name that is "experts": attention, routers, shared experts, dense
# layers, head, towers. A pattern, because hosts rename modules, and names would have to follow.
_NO_EXPERTS = r"re:^(?!.*\.experts(?:\.|$)).*"
_OLD = ("quantization_config", "compression_config")


def converted_config(
    entries: Mapping[str, Any], target: Target, kept: Iterable[str] = ()
) -> dict[str, Any]:
    """Return config.json of the converted checkpoint.

    Parameters
    ----------
    entries
        Of the source's config.json.
    target
        What experts are quantised to.
    kept
        Modules of experts that are as they were.
    """
    plain = {key: _without(value) for key, value in entries.items() if key not in _OLD}
    group = {
        "targets": ["Linear"],
        "weights": dict(target.weights),
        "input_activations": dict(target.activations) if target.activations else None,
        "output_activations": None,
        # vLLM asks the group, others the whole.
        "format": target.file_format,
    }
    ignored = [_NO_EXPERTS, *(rf"re:{re.escape(module)}(?:\..*)?$" for module in kept)]
    plain["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": target.file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
    return plain


def _without(value: Any) -> Any:
    """Return a value of config.json without what models in it say of codes, however deep."""
    if isinstance(value, list):
        return [_without(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: _without(one) for key, one in value.items() if key not in _OLD}
