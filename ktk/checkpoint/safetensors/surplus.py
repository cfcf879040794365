"""Finds tensors of experts that no row of the tables explains.

Weights that come with something nobody reads are not what they seem: a second scale, an adapter, a
bias, another form of the same experts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cache

from ktk.checkpoint.safetensors.families import FAMILIES, PREFIXES

# What quantised activations are made with, since ktk encodes activations its own way; and what the
# router adds to its scores.
_HARMLESS = re.compile(r"[._](?:input_\w+|activation_scale|qscale_act)|\.e_score_correction_bias")


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
        if match is None or name in read:
            continue
        if not _HARMLESS.fullmatch(match["rest"] or match["other"] or ""):
            found.append(name)
    return sorted(found)


@cache
def _expert_pattern() -> re.Pattern[str]:
    """Match whatever begins with the name of a matrix, or lies in a module of experts."""
    stems = {stored.stem for family in FAMILIES for stored in family.parts.values()}
    modules = {
        stem[: stem.index("experts") + len("experts")] for stem in stems if "experts" in stem
    }
    prefix = "|".join(re.escape(one).replace(r"\{L\}", r"\d+") for one in PREFIXES)
    return re.compile(
        rf"(?P<prefix>{prefix})(?:(?:{_any_of(stems)})(?P<rest>(?:[._].*)?)|"
        rf"(?:{_any_of(modules)})(?P<other>\..*))"
    )


def _any_of(names: Iterable[str]) -> str:
    # Alternatives are tried in order: gate_up_proj_bias before gate_up_proj.
    ordered = sorted(names, key=lambda name: (-len(name), name))
    return "|".join(re.escape(name).replace(r"\{e\}", r"\d+") for name in ordered)
