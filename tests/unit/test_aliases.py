"""Names that stand for a backend: the first that is installed and can run here."""

from __future__ import annotations

import fake_plugins
import pytest
from fake_plugins import Plugins, table, unsupported

import ktk
from ktk import registry
from ktk.errors import (
    BackendImportError,
    BackendNotFound,
    BackendUnsupported,
)
from ktk.names import ALIASES

plugins, core = fake_plugins.plugins, fake_plugins.core


def test_an_alias_is_the_backend_it_stands_for(plugins: Plugins, core: None) -> None:
    plugins.add("FP8", __ktk_backend__=table())
    backend = registry.load_backend("MXFP8")
    assert backend is registry.load_backend("FP8")
    assert registry.aliases() == {"FP8_PERCHANNEL": "FP8", "MXFP8": "FP8", "AMXFP8": "FP8"}
    assert "MXFP8" not in registry.backends(), "an alias is no backend"


def test_the_first_installed_backend_of_an_alias_counts(plugins: Plugins, core: None) -> None:
    plugins.add("BLIS", __ktk_backend__=table())
    assert registry.load_backend("MOE_INT8").info.name == "BLIS"
    plugins.add("AMXINT8", __ktk_backend__=table())
    assert registry.load_backend("MOE_INT8").info.name == "AMXINT8"


def test_an_alias_passes_over_what_cannot_run_here(plugins: Plugins, core: None) -> None:
    plugins.add("AMXINT8", __ktk_backend__=unsupported("there is no AVX2"))
    plugins.add("KML", __ktk_backend__=table())
    assert registry.load_backend("MOE_INT8").info.name == "KML"
    assert registry.aliases()["MOE_INT8"] == "KML"


def test_an_alias_of_nothing_that_can_run_says_why(plugins: Plugins) -> None:
    plugins.add("BLIS", __ktk_backend__=unsupported("there is no libblis.so"))
    with pytest.raises(BackendUnsupported, match=r"there is no libblis\.so"):
        registry.load_backend("MOE_INT8")


def test_an_alias_hides_no_broken_backend(plugins: Plugins, core: None) -> None:
    plugins.add("AMXINT8", __ktk_backend__=lambda: 1 / 0)
    plugins.add("KML", __ktk_backend__=table())
    with pytest.raises(BackendImportError, match="ZeroDivisionError"):
        registry.load_backend("MOE_INT8")


def test_a_backend_outside_this_build_is_no_target_of_an_alias(
    plugins: Plugins, core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_built", lambda: frozenset({"kml"}))
    plugins.announce("AMXINT8", "ktk._backends.amxint8", "ktk")
    plugins.add("KML", __ktk_backend__=table())
    assert registry.load_backend("MOE_INT8").info.name == "KML"


def test_a_registered_backend_wins_over_an_alias(plugins: Plugins, core: None) -> None:
    plugins.add("FP8", __ktk_backend__=table())
    plugins.add("MXFP8", "acme-mx", __ktk_backend__=table())
    assert registry.load_backend("MXFP8").info.distribution == "acme-mx"
    assert "MXFP8" not in registry.aliases()


def test_an_alias_without_its_backend_says_what_is_missing(plugins: Plugins) -> None:
    plugins.announce("BF16", "two")
    with pytest.raises(BackendNotFound) as caught:
        registry.load_backend("MXFP8")
    expected = "no backend 'MXFP8', which is an alias of FP8; installed: BF16"
    assert str(caught.value) == expected


def test_a_wrong_name_may_be_close_to_an_alias(plugins: Plugins) -> None:
    plugins.announce("FP8", "one")
    with pytest.raises(BackendNotFound, match=r"Did you mean 'FP8_PERCHANNEL' \(an alias of FP8"):
        registry.load_backend("fp8_per_channel")


def test_aliases_name_no_backend_of_ktk() -> None:
    """A name in both lists would be an alias that nothing can reach."""
    own = {name for name, info in ktk.backends().items() if info.distribution == "ktk"}
    assert not own & ALIASES.keys()
