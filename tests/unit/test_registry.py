"""Backends are found by name."""

from __future__ import annotations

from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

import fake_plugins
import pytest
from fake_plugins import Plugins, table

import ktk
from ktk import registry
from ktk.errors import (
    BackendConflict,
    BackendNotFound,
)

plugins, core = fake_plugins.plugins, fake_plugins.core


_tables: list[Any] = []


def test_no_module_takes_the_place_of_a_public_name() -> None:
    """Importing `ktk.name` would bind the module over what `ktk.name` is."""
    assert {module.name for module in iter_modules(ktk.__path__)}.isdisjoint(ktk.__all__)


def test_the_backends_of_ktk_are_listed() -> None:
    found = ktk.backends()
    assert {"AMXINT8", "BF16"} <= found.keys()
    assert found["BF16"].distribution == "ktk"
    assert found["BF16"].built


def test_listing_imports_nothing(plugins: Plugins) -> None:
    plugins.announce("BOOM", "a_module_that_does_not_exist")
    assert registry.backends()["BOOM"].value == "a_module_that_does_not_exist"


def test_a_backend_is_loaded_once(plugins: Plugins, core: None) -> None:
    plugins.add("FAKE", __ktk_backend__=table())
    first = registry.load_backend("FAKE")
    assert first is registry.load_backend("FAKE")
    assert str(first.info) == "FAKE of acme 1.2"


def test_the_provider_may_be_an_object_of_a_module(plugins: Plugins, core: None) -> None:
    module = plugins.add("UNUSED", provider=SimpleNamespace(__ktk_backend__=table()))
    plugins.announce("FAKE", f"{module}:provider")
    assert registry.load_backend("FAKE")


@pytest.mark.parametrize("asked", ["amxint8", "AmxInt8"])
def test_a_name_may_be_in_any_case(plugins: Plugins, core: None, asked: str) -> None:
    plugins.add("AMXINT8", __ktk_backend__=table())
    assert registry.load_backend(asked) is registry.load_backend("AMXINT8")
    assert registry.load_backend("moe_int8") is registry.load_backend("AMXINT8")


def test_a_name_in_another_case_must_mean_one_backend(plugins: Plugins, core: None) -> None:
    for name in ("Fake", "FAKE"):
        plugins.add(name, __ktk_backend__=table())
        assert registry.load_backend(name).info.name == name
    with pytest.raises(BackendNotFound, match="no backend 'fake'; installed: FAKE, Fake"):
        registry.load_backend("fake")


@pytest.mark.parametrize("asked", [None, 8, b"BF16"])
def test_a_name_is_a_str(asked: Any) -> None:
    with pytest.raises(TypeError, match=f"by its name, a str .* got {type(asked).__name__}$"):
        registry.load_backend(asked)


@pytest.mark.parametrize("asked", ["NVFP6", "SYCL_GPTQ_INT4", "AMXINT6", "FP4", "INT9"])
def test_another_format_is_no_slip_of_the_finger(asked: str) -> None:
    with pytest.raises(BackendNotFound) as caught:
        registry.load_backend(asked)
    assert str(caught.value).startswith(f"no backend {asked!r}; installed: ")
    assert "Did you mean" not in str(caught.value)
    assert caught.value.brief == "is not installed"


@pytest.mark.parametrize("asked", ["AMXINT", "AMXIT8", "AXMINT8"])
def test_a_wrong_name_gets_the_close_one(plugins: Plugins, asked: str) -> None:
    plugins.announce("AMXINT8", "one")
    plugins.announce("BF16", "two")
    with pytest.raises(BackendNotFound) as caught:
        registry.load_backend(asked)
    expected = f"no backend {asked!r}; installed: AMXINT8, BF16. Did you mean 'AMXINT8'?"
    assert str(caught.value) == expected


def test_a_name_like_no_other_gets_the_list(plugins: Plugins) -> None:
    plugins.announce("BF16", "two")
    with pytest.raises(BackendNotFound, match=r"no backend 'QUUX'; installed: BF16$"):
        registry.load_backend("QUUX")


def test_nothing_installed_is_said(plugins: Plugins) -> None:
    with pytest.raises(BackendNotFound, match="installed: none"):
        registry.load_backend("BF16")


def test_two_providers_are_named_and_one_can_be_chosen(plugins: Plugins, core: None) -> None:
    plugins.add("FAKE", "zeta-kernels", "3.0", __ktk_backend__=table())
    plugins.add("FAKE", "acme", "1.2", __ktk_backend__=table())
    with pytest.raises(BackendConflict) as caught:
        registry.load_backend("FAKE")
    for part in ("acme 1.2", "zeta-kernels 3.0", "distribution="):
        assert part in str(caught.value)
    chosen = registry.load_backend("FAKE", distribution="Zeta_Kernels")
    assert chosen.info.distribution == "zeta-kernels"
    assert registry.backends()["FAKE"].rivals == ("zeta-kernels",)


def test_the_wrong_distribution_is_said(plugins: Plugins) -> None:
    plugins.announce("FAKE", "one")
    with pytest.raises(BackendNotFound, match=r"'other' provides no backend 'FAKE'.*acme"):
        registry.load_backend("FAKE", distribution="other")
