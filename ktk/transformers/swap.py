"""Adds to the class of a module, which stays what it is for whoever asks for the class."""

from __future__ import annotations

from typing import Any

_made: dict[tuple[type, ...], type] = {}


def add_to_class(module: Any, added: type, *, last: bool = False) -> None:
    """Let a module be of its class and of another one, whose methods come first.

    Parameters
    ----------
    module
        Of a model. Models find modules to initialise and to record by their classes and the names
        of these, so both stay.
    added
        A class without a constructor.
    last : bool
        Its methods come last, so that the module computes what it did.
    """
    kind = type(module)
    if isinstance(module, added):
        return
    both = (kind, added) if last else (added, kind)
    if both not in _made:
        _made[both] = type(kind.__name__, both, {"__module__": kind.__module__})
    module.__class__ = _made[both]


def take_from_class(module: Any, added: type) -> None:
    """Let a module be of its own class only, unless its class was added to again since."""
    bases = type(module).__bases__
    if added in bases and _made.get(bases) is type(module):
        [module.__class__] = [kind for kind in bases if kind is not added]
