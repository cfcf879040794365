"""What `help(ktk)` and an editor know: every keyword is in a signature, and is described."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

import pytest

import ktk

# numpydoc's order.
SECTIONS = ("Parameters", "Attributes", "Returns", "Raises", "Notes")


def public_callables() -> Iterator[tuple[str, Any]]:
    """Yield the functions, classes and methods behind `ktk.__all__` that are written in Python."""
    for name in ktk.__all__:
        value = getattr(ktk, name)
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value) and value.__module__ != "ktk._core":
            if inspect.isfunction(value.__init__):
                yield name, value
            for attribute in dir(value):
                member = getattr(value, attribute)
                own = (getattr(member, "__module__", None) or "").startswith("ktk.")
                if own and (attribute == "__call__" or not attribute.startswith("_")):
                    yield f"{name}.{attribute}", member


CALLABLES = dict(public_callables())


def sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring by their titles, in order."""
    parts = re.split(r"^(\w+)\n-+\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def described(text: str) -> set[str]:
    """Return the names before the descriptions of a section "Parameters"."""
    heads = re.findall(r"^(\w.*)$", text, flags=re.MULTILINE)
    return {name.strip() for head in heads for name in head.partition(" :")[0].split(",")}


def test_all_of_them_are_looked_at() -> None:
    expected = {"Backend.moe", "MoE", "MoE.__call__", "MoE.load", "MoE.from_checkpoint", "Model"}
    assert expected <= CALLABLES.keys()
    assert len(CALLABLES) > 40


@pytest.mark.parametrize("name", CALLABLES)
def test_no_keyword_hides_behind_two_stars(name: str) -> None:
    parameters = inspect.signature(CALLABLES[name]).parameters.values()
    assert not [str(one) for one in parameters if one.kind is one.VAR_KEYWORD]


@pytest.mark.parametrize("name", CALLABLES)
def test_sections_stand_in_order_and_describe_every_parameter(name: str) -> None:
    found = sections(CALLABLES[name].__doc__ or "")
    assert [title for title in SECTIONS if title in found] == list(found)
    if "Parameters" in found:
        parameters = set(inspect.signature(CALLABLES[name]).parameters) - {"self"}
        assert described(found["Parameters"]) == parameters


def test_a_layers_keywords_are_the_fields_of_its_configuration() -> None:
    keywords = inspect.signature(ktk.Backend.moe).parameters
    for field in fields(ktk.MoEConfig):
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        assert keywords[field.name].default == default
        assert keywords[field.name].annotation == field.type
    for name, one in inspect.signature(ktk.MoE).parameters.items():
        if one.kind is one.KEYWORD_ONLY:
            assert keywords[name] == one
