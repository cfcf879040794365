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
    module.__class__ = _class(both, kind)


def _class(both: tuple[type, ...], kind: type) -> type:
    if both not in _made:
        own: dict[str, Any] = {"__module__": kind.__module__}
        if all(map(_is_reduced_as_objects_are, both)):
            own["__reduce_ex__"] = _reduce
        _made[both] = type(kind.__name__, both, own)
    return _made[both]


def _is_reduced_as_objects_are(kind: Any) -> bool:
    usual = (object.__reduce_ex__, _reduce)
    return kind.__reduce__ is object.__reduce__ and kind.__reduce_ex__ in usual


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Let pickle get to the members, of which packed ones say why they cannot be pickled.

    It finds a class by its name, and under the name is the class that was added to.
    """
    reduced: tuple[Any, ...] = object.__reduce_ex__(self, protocol)  # type: ignore[assignment]
    return (_made_again, (_recipe(type(self)),), *reduced[2:])


def _recipe(kind: type) -> Any:
    """Return the classes that one is made of; itself where it was not made here."""
    is_made = _made.get(kind.__bases__) is kind
    return (kind.__name__, *map(_recipe, kind.__bases__)) if is_made else kind


def _class_of(recipe: Any) -> Any:
    if not isinstance(recipe, tuple):
        return recipe
    name, *bases = recipe
    both = tuple(map(_class_of, bases))
    return _class(both, next(one for one in both if one.__name__ == name))


def _made_again(recipe: Any) -> Any:
    kind: Any = _class_of(recipe)
    return kind.__new__(kind)


def take_from_class(module: Any, added: type) -> None:
    """Let a module be of its own class only, unless its class was added to again since."""
    bases = type(module).__bases__
    if added in bases and _made.get(bases) is type(module):
        [module.__class__] = [kind for kind in bases if kind is not added]
