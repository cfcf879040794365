"""Loads files of SGLang unchanged, among stand-ins for the modules that these import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Standins = Mapping[str, Mapping[str, Any]]


def put(
    patch: pytest.MonkeyPatch,
    name: str,
    attributes: Mapping[str, Any],
    kind: type[ModuleType] = ModuleType,
) -> ModuleType:
    """Put a module of these attributes into sys.modules, and packages above it."""
    parent, _, last = name.rpartition(".")
    if parent and parent not in sys.modules:
        put(patch, parent, {}, kind)
    module = kind(name)
    module.__dict__.update(attributes, __path__=[])
    patch.setitem(sys.modules, name, module)
    if parent:
        patch.setattr(sys.modules[parent], last, module, raising=False)
    return module


def load(patch: pytest.MonkeyPatch, files: Path, name: str) -> ModuleType:
    """Run a file of a release as the module that it is."""
    path = files.joinpath(*name.split(".")).with_suffix(".py")
    if not path.is_file():
        path = files.joinpath(*name.split("."), "__init__.py")
    parent, _, last = name.rpartition(".")
    if parent not in sys.modules:
        put(patch, parent, {})
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    patch.setattr(sys.modules[parent], last, module, raising=False)
    spec.loader.exec_module(module)
    return module


def stage(
    patch: pytest.MonkeyPatch,
    files: Path,
    standins: Standins,
    *names: str,
    kind: type[ModuleType] = ModuleType,
) -> ModuleType:
    """Take away all of SGLang that is loaded, put stand-ins there, and load files; the last one."""
    for name in [*sys.modules]:
        if name.partition(".")[0] in ("sglang", "kt_kernel"):
            patch.delitem(sys.modules, name)
    for name, attributes in standins.items():
        put(patch, name, attributes, kind)
    return [load(patch, files, name) for name in names][-1]
