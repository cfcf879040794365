"""Finds tensors of experts that no row of the tables explains.

Weights that come with something nobody reads are not what they seem: a second scale, an adapter, a
bias, another form of the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from ktk.checkpoint.safetensors.families import FAMILIES

#: What quantised activations are made with, since ktk encodes activations its own way: a pattern
#: for what follows the name of a matrix.
OF_ACTIVATIONS = r"[._](?:input_\w+|activation_scale|qscale_act)"
# These, and what the router adds to its scores.
_HARMLESS = re.compile(rf"{OF_ACTIVATIONS}|\.e_score_correction_bias")


def surplus(names: Iterable[str], prefix: str, read: Collection[str]) -> list[str]:
    """Return the names of experts' tensors, in one layer, that are neither read nor harmless.

    Parameters
    ----------
    names
        Of tensors of the layer.
    prefix
        What those of its experts begin with.
    read
        Those that are read.
    """
    found = []
    for name in names:
        if name in read:
            continue
        inside = name.startswith(prefix)
        pattern = _expert_pattern() if inside else _ELSEWHERE
        match = pattern.fullmatch(name, len(prefix) if inside else 0)
        if match is None:
            continue
        if not _HARMLESS.fullmatch(match["rest"] or match["other"] or ""):
            found.append(name)
    return sorted(found)


# In another module of experts
_ELSEWHERE = re.compile(r"(?:.*\.)?experts(?P<other>\..*)(?P<rest>)")


@cache
def _expert_pattern() -> re.Pattern[str]:
    """Match whatever begins with the name of a matrix, or lies in the module of the experts."""
    stems = {stored.stem for family in FAMILIES for stored in family.parts.values()}
    return re.compile(rf"(?:{_any_of(stems)})(?P<rest>(?:[._].*)?)|experts(?P<other>\..*)")


def _any_of(names: Iterable[str]) -> str:
    # Alternatives are tried in order: gate_up_proj_bias before gate_up_proj.
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(re.escape(name).replace(r"\{e\}", r"\d+") for name in ordered)
