"""Backends are found by name; whatever is wrong with one is said, and harms no other."""

from __future__ import annotations

import ctypes
import itertools
import sys
from importlib.metadata import EntryPoint
from pkgutil import iter_modules
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

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
from ktk.names import ALIASES

_unique = itertools.count()


class Plugins:
    """Pretends that packages are installed, without installing any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entries: list[EntryPoint] = []
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(registry, "entry_points", lambda group: self.entries)
        monkeypatch.setattr(registry, "_opened", {})

    def add(
        self, name: str, distribution: str = "acme", version: str = "1.2", **module: Any
    ) -> str:
        """Announce a backend whose module has these attributes; returns the module's name."""
        value = f"ktk_fake_{next(_unique)}"
        fake = ModuleType(value)
        vars(fake).update(module)
        self._monkeypatch.setitem(sys.modules, value, fake)
        return self.announce(name, value, distribution, version)

    def announce(
        self, name: str, value: str, distribution: str = "acme", version: str = "1.2"
    ) -> str:
        """Add an entry point only."""
        entry = EntryPoint(name=name, value=value, group=registry.GROUP)
        # EntryPoint is immutable and learns its distribution this way from importlib itself.
        vars(entry)["dist"] = SimpleNamespace(name=distribution, version=version)
        self.entries.append(entry)
        return value


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    return Plugins(monkeypatch)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accept any dictionary as a backend's table."""

    def backend(capsule: Any) -> Any:
        if isinstance(capsule, Exception):
            raise capsule
        return SimpleNamespace(**capsule)

    monkeypatch.setattr(ktk._core, "Backend", backend)
    monkeypatch.setattr(
        "ktk.backend.Backend",
        lambda core, info, library: SimpleNamespace(
            info=info, variants=core.variants, library=library
        ),
    )


def variant(name: str, *missing: str) -> Any:
    return SimpleNamespace(name=name, missing_isa=list(missing), runnable=not missing)


def table(*variants: Any) -> Any:
    return lambda: {"variants": list(variants) or [variant("avx2")]}


_tables: list[Any] = []


def capsule(*, abi_major: int) -> object:
    """Make a real capsule around a table of another ABI: struct_size, major and minor."""

    class Table(ctypes.Structure):
        _fields_ = (
            ("struct_size", ctypes.c_size_t),
            ("abi_major", ctypes.c_uint32),
            ("abi_minor", ctypes.c_uint32),
            ("rest", ctypes.c_char * 4096),
        )

    table = Table(ctypes.sizeof(Table), abi_major, 0)
    _tables.append(table)  # a table outlives the process
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    made: object = new(ctypes.addressof(table), b"ktk.backend", None)
    return made


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


def unsupported(reason: str, **short: str) -> Any:
    def hook() -> None:
        raise BackendUnsupported(reason, **short)

    return hook


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
