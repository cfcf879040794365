"""What the installed transformers has with experts, found in its folders, not listed.

A family is a folder with a class of experts, or with a configuration that counts some: classes of
next year may be called otherwise, and some wait for packages that are not installed.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import transformers.models

from ktk.transformers.unmarked import mark


@dataclass(frozen=True)
class Family:
    """A folder of transformers.

    Attributes
    ----------
    classes
        Of experts, by their names.
    counted
        Entries of its configurations that have to do with experts.
    """

    classes: dict[str, type]
    counted: frozenset[str]


def families() -> dict[str, Family]:
    """Return the families by the names of their folders."""
    found = {}
    for folder in pkgutil.iter_modules(transformers.models.__path__):
        modules = list(_modules(folder.name))
        classes = {kind.__name__: kind for kind in _own(modules) if is_kind_of_experts(kind)}
        counted = frozenset(name for kind in _own(modules) for name in _entries(kind))
        if classes or counted:
            found[folder.name] = Family(classes, counted)
    mark()
    return found


def is_kind_of_experts(kind: type) -> bool:
    """Whether a class is of experts by its name, or lets other implementations compute them."""
    return issubclass(kind, torch.nn.Module) and (
        "Expert" in kind.__name__ or hasattr(kind, "_apply_gate")
    )


def _modules(folder: str) -> Iterator[ModuleType]:
    """Yield the modules with models and configurations that can be imported."""
    package = importlib.import_module(f"transformers.models.{folder}")
    for one in pkgutil.iter_modules(getattr(package, "__path__", ())):
        if one.name.startswith(("modeling_", "configuration_")):
            try:
                yield importlib.import_module(f"{package.__name__}.{one.name}")
            except ImportError:  # wants a package that is not installed
                continue


def _own(modules: list[ModuleType]) -> Iterator[type]:
    for module in modules:
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == module.__name__:
                yield kind


def _entries(kind: type) -> Iterator[str]:
    """Yield the entries of a class of configurations that are called after experts."""
    if not issubclass(kind, transformers.PreTrainedConfig):
        return
    known: dict[str, Any] = dict(getattr(kind, "attribute_map", {}))
    for base in kind.__mro__:
        known |= vars(base).get("__annotations__", {})
    yield from (name for name in known if "expert" in name)
