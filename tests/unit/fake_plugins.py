"""Pretends that packages with backends are installed."""

from __future__ import annotations

import ctypes
import itertools
import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ktk
from ktk import registry
from ktk.errors import BackendUnsupported

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
        self,
        name: str,
        value: str,
        distribution: str | None = "acme",
        version: str | None = "1.2",
    ) -> str:
        """Add an entry point only; of None, where somebody deleted the package's metadata."""
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


def unsupported(reason: str, **short: str) -> Any:
    def hook() -> None:
        raise BackendUnsupported(reason, **short)

    return hook
