"""Modules of experts whose weights are those of another module: packed once, and called by both.

DiffusionGemma's encoder has the weights of its decoder. Transformers ties such parameters by their
names when it has loaded one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktk.transformers.layout import WEIGHTS, is_experts
from ktk.transformers.packed import Packed, drop_weights, leave_alone, packed_of, put

_TIES = "all_tied_weights_keys"


def tied_experts(model: Any) -> dict[str, str]:
    """Return the modules of experts that have another's weights, each with the name of that one."""
    modules = dict(model.named_modules())
    found = {}
    for target, source in (getattr(model, _TIES, None) or {}).items():
        (name, _, weight), other = target.rpartition("."), source.rpartition(".")[0]
        if weight in WEIGHTS and all(is_experts(modules.get(one)) for one in (name, other)):
            found[name] = other
    return found


def drop_tied(model: Any, tied: Mapping[str, str]) -> None:
    """Take the weights out of modules that have another's, and what is said of tying them."""
    for name in tied:
        module = model.get_submodule(name)
        drop_weights(module, name)
        module._is_hf_initialized = True  # there is nothing to initialise
        setattr(model, _TIES, _without(getattr(model, _TIES), name))


def share(model: Any, tied: Mapping[str, str]) -> None:
    """Give modules that have another's weights what that one was packed into."""
    for name, other in tied.items():
        packed, module = packed_of(model.get_submodule(other)), model.get_submodule(name)
        if isinstance(packed, Packed):
            drop_tied(model, {name: other})
            put(module, packed)
        elif packed is False:
            leave_alone(module)


def named_once(packed: Mapping[str, Packed]) -> dict[str, Packed]:
    """Return what modules were packed into under one name each: that of the weights' own module."""
    names: dict[int, str] = {}
    for name, one in packed.items():
        if id(one) not in names or name.endswith(one.name):
            names[id(one)] = name
    return {name: packed[name] for name in names.values()}


def _without(ties: Mapping[str, str], module: str) -> dict[str, str]:
    gone = {f"{module}.{weight}" for weight in WEIGHTS}
    return {target: source for target, source in ties.items() if target not in gone}
