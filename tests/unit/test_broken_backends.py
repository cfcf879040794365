"""Whatever is wrong with a backend is said, and harms no other."""

from __future__ import annotations

import sys

import fake_plugins
import pytest
from fake_plugins import Plugins, capsule, table, unsupported, variant

import ktk
from ktk import registry
from ktk._backends import _built
from ktk.errors import (
    BackendConflict,
    BackendError,
    BackendImportError,
    BackendIncompatible,
    BackendNotFound,
    BackendUnsupported,
)

plugins, core = fake_plugins.plugins, fake_plugins.core


def test_an_import_error_names_the_distribution_and_keeps_its_cause(plugins: Plugins) -> None:
    plugins.announce("FAKE", "a_module_that_does_not_exist")
    with pytest.raises(BackendImportError, match=r"FAKE of acme 1\.2.*does_not_exist") as caught:
        registry.load_backend("FAKE")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), SystemExit(3), OSError("no libfoo.so")])
def test_whatever_a_plugin_raises_is_contained(plugins: Plugins, error: BaseException) -> None:
    def hook() -> None:
        raise error

    plugins.add("FAKE", __ktk_backend__=hook)
    with pytest.raises(BackendImportError) as caught:
        registry.load_backend("FAKE")
    assert caught.value.__cause__ is error
    assert type(error).__name__ in str(caught.value)


def test_a_module_without_the_hook_is_said(plugins: Plugins) -> None:
    plugins.add("FAKE")
    with pytest.raises(BackendImportError, match="__ktk_backend__"):
        registry.load_backend("FAKE")


def test_what_is_no_capsule_is_refused(plugins: Plugins) -> None:
    plugins.add("FAKE", __ktk_backend__=lambda: 42)
    with pytest.raises(BackendImportError, match=r"FAKE of acme 1\.2"):
        registry.load_backend("FAKE")


def test_a_broken_table_is_an_import_error(plugins: Plugins, core: None) -> None:
    plugins.add("FAKE", __ktk_backend__=lambda: ValueError("variant avx2 has no pack_weight"))
    with pytest.raises(BackendImportError, match="variant avx2 has no pack_weight"):
        registry.load_backend("FAKE")


@pytest.mark.parametrize(("offset", "remedy"), [(1, "upgrade ktk"), (-1, "upgrade acme")])
def test_another_abi_names_both_versions_and_who_is_behind(
    plugins: Plugins, offset: int, remedy: str
) -> None:
    ours = ktk._core.ABI[0]
    plugins.add("FAKE", __ktk_backend__=lambda: capsule(abi_major=ours + offset))
    with pytest.raises(BackendIncompatible) as caught:
        registry.load_backend("FAKE")
    for part in ("FAKE of acme 1.2", f"ABI {ours + offset}.0", f"ktk speaks {ours}.", remedy):
        assert part in str(caught.value)


def test_missing_instruction_sets_are_named(plugins: Plugins, core: None) -> None:
    variants = variant("amx_int8", "amx_int8", "avx512"), variant("avx512_vnni", "avx512_vnni")
    plugins.add("FAKE", __ktk_backend__=table(*variants))
    expected = "amx_int8 needs amx_int8, avx512; avx512_vnni needs avx512_vnni"
    with pytest.raises(BackendUnsupported, match=expected):
        registry.load_backend("FAKE")
    opened = registry.open_backend(registry.find_backend("FAKE"))
    assert len(opened.variants) == 2, "the table can still be looked at"


def test_a_backend_may_say_that_this_machine_lacks_something(plugins: Plugins) -> None:
    plugins.add("FAKE", __ktk_backend__=unsupported("there is no libfake.so"))
    expected = "^backend FAKE of acme 1.2 cannot run here: there is no libfake.so$"
    with pytest.raises(BackendUnsupported, match=expected):
        registry.load_backend("FAKE")


def test_a_reason_has_a_short_form(plugins: Plugins) -> None:
    long = "there is no libfake.so, in any of the folders /a, /b; install it or another one"
    plugins.add("TOLD", __ktk_backend__=unsupported(long, brief="needs libfake", advice="get it"))
    plugins.add("TERSE", __ktk_backend__=unsupported(long))
    plugins.add("BROKEN", __ktk_backend__=lambda: 1 / 0)
    short = {
        "TOLD": ("needs libfake", "get it"),
        "TERSE": ("there is no libfake.so", ""),
        "BROKEN": (
            "fails to load (ZeroDivisionError)",
            "reinstall acme, or uninstall it if it is not needed",
        ),
    }
    for name, expected in short.items():
        for _ in range(2):  # remembered, too
            with pytest.raises(BackendError) as caught:
                registry.load_backend(name)
            assert (caught.value.brief, caught.value.advice) == expected


def test_a_backend_on_a_library_says_which(plugins: Plugins, core: None) -> None:
    facts = {"library": "/opt/libfake.so.1", "mode": "fast"}
    plugins.add("FAKE", __ktk_backend__=table(), __ktk_library__=lambda: facts)
    plugins.add("PLAIN", __ktk_backend__=table())
    assert registry.load_backend("FAKE").library == facts
    assert registry.load_backend("PLAIN").library is None


def test_a_failure_is_remembered(plugins: Plugins) -> None:
    calls = []

    def hook() -> None:
        calls.append(1)
        raise RuntimeError("only once")

    plugins.add("FAKE", __ktk_backend__=hook)
    messages = set()
    for _ in range(3):
        with pytest.raises(BackendImportError) as caught:
            registry.load_backend("FAKE")
        messages.add(str(caught.value))
        assert isinstance(caught.value.__cause__, RuntimeError)
    assert len(messages) == 1
    assert len(calls) == 1


def test_a_module_that_did_not_load_is_tried_again(
    plugins: Plugins, core: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = plugins.add("FAKE", __ktk_backend__=table())
    module = sys.modules[value]
    monkeypatch.setitem(sys.modules, value, None)  # importing it is an ImportError
    with pytest.raises(BackendImportError):
        registry.load_backend("FAKE")
    monkeypatch.setitem(sys.modules, value, module)
    assert registry.load_backend("FAKE")


def test_a_package_without_metadata_harms_no_other(plugins: Plugins, core: None) -> None:
    plugins.announce("FAKE", "gone", distribution=None, version=None)
    plugins.add("FAKE", __ktk_backend__=table())
    plugins.add("OTHER", __ktk_backend__=table())
    assert registry.load_backend("OTHER")
    found = {info.distribution for info in registry.providers() if info.name == "FAKE"}
    assert found == {"acme", "(unknown)"}


def test_a_broken_plugin_harms_no_other(plugins: Plugins, core: None) -> None:
    plugins.announce("BROKEN", "a_module_that_does_not_exist")
    plugins.add("FAKE", __ktk_backend__=table())
    with pytest.raises(BackendError):
        registry.load_backend("BROKEN")
    assert registry.load_backend("FAKE")


def test_a_backend_left_out_of_the_build_is_marked(
    plugins: Plugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_built", lambda: frozenset({"bf16"}))
    plugins.announce("BF16", "ktk._backends.bf16", "ktk")
    plugins.announce("OLD", "ktk._backends.old", "ktk")
    plugins.announce("OTHER", "acme.old")
    built = {name: info.built for name, info in registry.backends().items()}
    assert built == {"BF16": True, "OLD": False, "OTHER": True}
    with pytest.raises(BackendNotFound, match="'OLD' is not part of this build of ktk"):
        registry.load_backend("OLD")


def test_a_backend_of_another_architecture_says_which() -> None:
    here = _built.ARCHITECTURE
    name, there = {"x86_64": ("KML", "aarch64"), "aarch64": ("AMXINT8", "x86_64")}[here]
    assert not registry.backends()[name].built
    needs = rf"^backend '{name}' needs an {there} processor; this ktk \S+ is built for {here}$"
    with pytest.raises(BackendUnsupported, match=needs):
        registry.load_backend(name)


def test_errors_are_one_tree() -> None:
    kinds = (
        BackendNotFound,
        BackendConflict,
        BackendImportError,
        BackendIncompatible,
        BackendUnsupported,
    )
    assert all(issubclass(kind, BackendError) for kind in kinds)
    assert issubclass(BackendError, RuntimeError)
