"""Finds tensors of experts that no row of the tables explains.

Weights that come with something nobody reads are not what they seem: a second scale, an adapter, a
bias, another form of the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from ktk.checkpoint.families import FAMILIES, PREFIXES

# What quantised activations are made with: ktk encodes activations its own way.
_HARMLESS = re.compile(r"[._]input_\w+")


def by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of experts' tensors by what stands before them."""
    found: dict[str, list[str]] = {}
    for name in names:
        if match := _expert_pattern().fullmatch(name):
            found.setdefault(match["prefix"], []).append(name)
    return found


def surplus(names: Iterable[str], read: Collection[str]) -> list[str]:
    """Return the names of experts' tensors, in one layer, that are neither read nor harmless."""
    found = []
    for name in names:
        match = _expert_pattern().fullmatch(name)
        if match and name not in read and not _HARMLESS.fullmatch(match["rest"]):
            found.append(name)
    return sorted(found)


@cache
def _expert_pattern() -> re.Pattern[str]:
    """Match whatever begins with the name of a matrix of any family."""
    stems = sorted(
        {stored.stem for family in FAMILIES for stored in family.parts.values()},
        # Alternatives are tried in order: gate_up_proj_bias before gate_up_proj.
        key=lambda stem: (-len(stem), stem),
    )
    prefix = "|".join(re.escape(one).replace(r"\{L\}", r"\d+") for one in PREFIXES)
    stem = "|".join(re.escape(one).replace(r"\{e\}", r"\d+") for one in stems)
    return re.compile(rf"(?P<prefix>{prefix})(?:{stem})(?P<rest>(?:[._].*)?)")
