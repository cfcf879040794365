"""Finds where in a model experts are, by the shape of their names.

    thinker.model.layers.3.mlp.experts.5.gate_proj.weight
    `-----------' `------' `--'`------------------------'
       before      layer  module     what families name

Nothing but the last part is listed anywhere. The layer is the leftmost ``layers.3``, ``blocks.3``
and so on; where there is none, the leftmost number that is not that of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktk.checkpoint.nearest import layer_of
from ktk.errors import CheckpointError

_EXPERT = re.compile(r"(?<=experts\.)(expert_)?\d+(?=\.)")
# Computed for every token, or part of attention: no routed experts of a feed-forward layer.
_OTHER = re.compile(r"shared|share_|attn|attention")
# Beside the language model: what draws on it, what it draws on, and layers that predict further
# tokens (MTP). They count where they are asked for, and where there is nothing else.
_BESIDE = re.compile(
    r"(mtp|nextn|next_n|eagle|draft|talker|code_predictor|vision|visual|vit|image|img|video|audio|"
    r"speech)(_.*|\d*|model)"
)


@dataclass(frozen=True)
class Location:
    """The module whose experts are those of a layer.

    Attributes
    ----------
    number
        Of the layer.
    head
        What the names of all tensors of the layer begin with.
    prefix
        What the names of its experts begin with.
    """

    number: int
    head: str
    prefix: str

    @property
    def beside(self) -> bool:
        """Whether this is beside the language model, or a layer that predicts further tokens."""
        return any(_BESIDE.fullmatch(word) for word in self.prefix.split("."))

    def inside(self, module: str) -> bool:
        """Whether a module of this name has these experts: any words in the middle of the name."""
        return f".{module.strip('.')}." in f".{self.prefix}"


class Locations:
    """Where the experts of all layers are.

    Parameters
    ----------
    folder
        For messages.
    names
        Of all tensors.
    known
        What the names of the first tensors of experts end with, the number of the expert as {e}.
    module
        The module that has the experts, where several do: words in the middle of their names.

    Attributes
    ----------
    all
        In every part of the model.
    """

    def __init__(
        self, folder: Path, names: Iterable[str], known: Collection[str], module: str | None
    ) -> None:
        self._folder = folder
        self._known = known
        self._module = module
        self._modules: dict[str, str | None] = {}
        found: dict[Location, None] = {}
        self._heads: dict[str, list[str]] = {}
        for name in names:
            if match := layer_of(name):
                head = match[0]
                self._heads.setdefault(head, []).append(name)
                inside = self._module_of(name[len(head) :])
                if inside is not None:
                    found[Location(int(match[1]), head, head + inside)] = None
        self.all = list(found)
        self._chosen = self._choose()

    def numbers(self) -> list[int]:
        """Return the layers that have experts, ascending."""
        return sorted({one.number for one in self._chosen})

    def of_layer(self, number: int) -> Location | None:
        """Return where the experts of a layer are; None if it has none.

        Raises
        ------
        CheckpointError
            They are in several places.
        """
        found = [one for one in self._chosen if one.number == number]
        if len(found) > 1:
            names = [one.prefix for one in found]
            choices = (_own(one, [other for other in names if other != one]) for one in names)
            raise CheckpointError(
                f"{self._folder} has experts of layer {number} under {' and under '.join(names)}: "
                f"say which are meant, by {' or '.join(f'module={one!r}' for one in choices)}"
            )
        return found[0] if found else None

    def names(self, location: Location) -> Iterator[str]:
        """Yield what names are, in the layer of a location, but those of other locations."""
        others = tuple(
            one.prefix
            for one in self.all
            if one.head == location.head and not location.prefix.startswith(one.prefix)
        )
        for name in self._heads[location.head]:
            rest = name[len(location.head) :]
            if name.startswith(location.prefix) or not (name.startswith(others) or is_other(rest)):
                yield name

    def _choose(self) -> list[Location]:
        if self._module is not None:
            return [one for one in self.all if one.inside(self._module)]
        return [one for one in self.all if not one.beside] or self.all

    def _module_of(self, rest: str) -> str | None:
        """Return what stands between the layer and the name of experts, where that is one."""
        shape = _EXPERT.sub(r"\1{e}", rest)
        if shape not in self._modules:
            self._modules[shape] = self._split(shape)
        return self._modules[shape]

    def _split(self, shape: str) -> str | None:
        at = 0
        while at >= 0:
            if shape[at:] in self._known:
                return None if is_other(shape[:at]) else shape[:at]
            at = shape.find(".", at) + 1 or -1
        return None


def is_other(names: str) -> bool:
    """Whether names are of experts that are computed for every token, or of attention."""
    return any(_OTHER.search(word) for word in names.split("."))


def _own(prefix: str, others: Sequence[str]) -> str:
    """Return the shortest run of words that a prefix has and the others have not."""
    words = prefix.rstrip(".").split(".")
    for length in range(1, len(words) + 1):
        for begin in range(len(words) - length + 1):
            run = ".".join(words[begin : begin + length])
            if not any(f".{run}." in f".{other}" for other in others):
                return run
    return prefix
