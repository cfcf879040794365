"""Adds to the class of a module, which stays what it is for whoever asks for the class."""

from __future__ import annotations

from typing import Any

_made: dict[tuple[type, type], type] = {}


def add_to_class(module: Any, added: type) -> None:
    """Let a module be of its class and of another one, whose methods come first.

    Parameters
    ----------
    module
        Of a model. Models find modules to initialise and to record by their classes and the names
        of these, so both stay.
    added
        A class without a constructor.
    """
    kind = type(module)
    if isinstance(module, added):
        return
    if (added, kind) not in _made:
        made = type(kind.__name__, (added, kind), {"__module__": kind.__module__})
        _made[added, kind] = made
    module.__class__ = _made[added, kind]
