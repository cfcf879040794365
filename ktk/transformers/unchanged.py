"""Whether all that a decision was based on is still as it was, asked in a few calls.

A layer of one token takes a millisecond, and evicts from caches what Python works with. To look at
everything again by functions of Python took a tenth of that.
"""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn

from ktk.transformers.bare import any_global_hook

_facts = attrgetter("dtype", "is_cpu")
_takes_gradients = attrgetter("requires_grad")


class Unchanged:
    """What was looked at: `holds()` as long as each attribute is the object that it was."""

    def __init__(self) -> None:
        self._dicts: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._values: list[Any] = []
        self._modules: list[nn.Module] = []
        self._kinds: list[type] = []
        self._hooks: list[Any] = []
        self._weights: list[torch.Tensor] = []
        self._pointers: list[int] = []
        self._facts: list[Any] = []

    def add(self, holder: Any, *names: str) -> None:
        """Add attributes of an object itself, not of its class; some may be missing."""
        self._add(vars(holder), names)

    def add_children(self, module: nn.Module, *names: str) -> None:
        """Add children of a module; some may be missing."""
        self._add(module._modules, names)

    def add_weights(self, module: nn.Module, *names: str) -> None:
        """Add parameters in CPU memory, and where they lie, not what values they have."""
        self._add(module._parameters, names)
        for name in names:
            weight = module._parameters.get(name)
            if weight is not None:
                self._weights.append(weight)
                self._pointers.append(weight.data_ptr())
                self._facts.append(_facts(weight))

    def add_bare(self, *modules: nn.Module) -> None:
        """Add that modules are of their class, and that these are bare (`are_bare`)."""
        for module in modules:
            self._modules.append(module)
            self._kinds.append(type(module))
            self._hooks += module._forward_pre_hooks, module._forward_hooks
            self.add(module, "_forward_pre_hooks", "_forward_hooks", "forward")

    def _add(self, holder: dict[str, Any], names: tuple[str, ...]) -> None:
        for name in names:
            self._dicts.append(holder)
            self._names.append(name)
            self._values.append(holder.get(name))

    def holds(self) -> bool:
        """Tell whether everything is as it was, and nobody records gradients of the weights."""
        return (
            not any(self._hooks)
            and not any_global_hook()
            and all(map(is_, map(dict.get, self._dicts, self._names), self._values))
            and all(map(is_, map(type, self._modules), self._kinds))
            and list(map(torch.Tensor.data_ptr, self._weights)) == self._pointers
            and list(map(_facts, self._weights)) == self._facts
            and not (torch.is_grad_enabled() and any(map(_takes_gradients, self._weights)))
        )
