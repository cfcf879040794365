"""docs/reference.md has every public name, and what classes can do."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from typing import Any

import pytest
from blocks import ROOT

PAGE = (ROOT / "docs/reference.md").read_text()
PACKAGES = (
    "ktk",
    "ktk.checkpoint",
    "ktk.cost",
    "ktk.distributed",
    "ktk.hub",
    "ktk.ktmoe",
    "ktk.placement",
    "ktk.quantize",
    "ktk.sft",
    "ktk.transformers",
)
#: A directive of Sphinx: what it is, of what name, and its options.
_DIRECTIVE = re.compile(r"^\.\. (\w+):: (\S+)\n((?:   :.*\n)*)", re.MULTILINE)


@pytest.fixture(autouse=True)
def importable() -> None:
    pytest.importorskip("transformers")


@cache
def resolved(name: str) -> Any:
    return resolve_name(name)


def entries(page: str) -> dict[str, str]:
    """Return what the directives of a page name, in full, with their options."""
    module, found = "", dict[str, str]()
    for directive, name, options in _DIRECTIVE.findall(page):
        if directive == "currentmodule":
            module = name
        elif directive == "automodule":
            found |= {f"{name}.{one}": options for one in import_module(name).__all__}
        else:
            found[name if name.startswith("ktk.") else f"{module}.{name}"] = options
    return found


def missing(page: str) -> list[str]:
    """Return public names that have no entry; one thing may have several names."""
    there = {id(resolved(name)) for name in entries(page)}
    public = {f"{name}.{one}" for name in PACKAGES for one in import_module(name).__all__}
    return sorted(name for name in public if id(resolved(name)) not in there)


def hidden(thing: Any, options: str) -> list[str]:
    """Return options without which an entry lacks calls, or members of bases."""
    if not isinstance(thing, type) or ":members:\n" not in options:
        return []
    wanted = []
    ours = [one for one in thing.__mro__ if one.__module__.startswith("ktk.")]
    if any("__call__" in vars(one) for one in ours):
        wanted.append(":special-members: __call__")
    if any(not member.startswith("_") for base in ours[1:] for member in vars(base)):
        wanted.append(":inherited-members:")
    return [option for option in wanted if f"{option}\n" not in options]


def test_every_public_name_has_an_entry() -> None:
    assert missing(PAGE) == []


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (".. autofunction:: get_include\n", ["ktk.get_include"]),
        (".. autofunction:: place\n", ["ktk.placement.place"]),
        (".. autoclass:: KTMoEWrapper\n", ["ktk.KTMoEWrapper", "ktk.ktmoe.KTMoEWrapper"]),
    ],
)
def test_a_name_without_an_entry_is_told(line: str, names: list[str]) -> None:
    assert line in PAGE
    assert missing(PAGE.replace(line, "")) == names


def test_the_page_says_whose_names_it_has() -> None:
    begins = PAGE.split("```", 1)[0]
    assert {"ktk", *re.findall(r"`(ktk\.\w+)`", begins)} == {*PACKAGES}


def test_classes_show_calls_and_inherited_members() -> None:
    found = {name: hidden(resolved(name), options) for name, options in entries(PAGE).items()}
    assert {name: options for name, options in found.items() if options} == {}
    of_moe = entries(PAGE)["ktk.MoE"]
    for option in (":special-members: __call__\n", ":inherited-members:\n"):
        left = of_moe.replace(f"   {option}", "")
        assert hidden(resolved("ktk.MoE"), left) == [option.strip()]
