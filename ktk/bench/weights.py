"""What a layer is loaded from: floats where a backend takes them, else its own format.

ggml's block types have no encoder in Python, for the most part: their layers are random blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ktk._core import Format
from ktk.expert import Expert, Matrix
from ktk.formats import label
from ktk.names import find_alias
from ktk.quantize import quantize
from ktk.testing.ggml import Bytes, is_block, random_blocks

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.bench.inputs import ExpertWeights

_FLOATS = ("bf16", "f16", "f32")


@dataclass(frozen=True)
class Recipe:
    """How to load a backend from floats.

    Attributes
    ----------
    given
        What it is given: floats, or what the floats are quantised to first.
    stored
        What it makes of that.
    """

    given: Format
    stored: Format

    @property
    def is_random(self) -> bool:
        """Whether the weights are random blocks instead of what the floats are quantised to."""
        return is_block(self.given.element)

    def expert(self, floats: ExpertWeights) -> Expert:
        """Return what one expert is loaded from."""
        return Expert(
            gate=self.matrix(floats.gate, floats.gate_bias, 1),
            up=self.matrix(floats.up, floats.up_bias, 2),
            down=self.matrix(floats.down, floats.down_bias, 3),
        )

    def matrix(self, tensor: torch.Tensor, bias: torch.Tensor | None, seed: int) -> Matrix:
        """Return what one matrix is loaded from; `seed` is for random blocks."""
        if self.is_random:
            blocks = _random_blocks(tensor, self.given.element, seed)
            return Matrix(self.given, blocks, bias=bias)
        return replace(quantize(tensor, self.given), bias=bias)


def recipe(backend: Backend, stored: Format) -> Recipe:
    """Return how to get weights into a stored format.

    Floats come first, so that a backend that quantises while it loads shows what it makes of them.
    Else it gets the stored format itself, ready-made.
    """
    given = [fmt for fmt, at in backend.core.accepts if backend.formats[at] == stored]
    plain = [fmt for name in _FLOATS for fmt in given if fmt.element == name]
    if plain:
        return Recipe(plain[0], stored)
    return Recipe(stored if stored in given else given[0], stored)


def choose_format(backend: Backend, name: str, text: str | None = None) -> Format:
    """Return the stored format that `text` says; without it, what the backend's `name` means.

    Parameters
    ----------
    backend : Backend
    name : str
        As the user typed it; an alias may mean a format.
    text : str, optional
        Words of a format's label, in any order, joined by hyphens: ``g32``, ``zero-g32``.
    """
    if text is None:
        alias = find_alias(name, (backend.name,))
        meant = alias.format if alias else None
        return meant if meant in backend.formats else backend.formats[0]
    # Counted: the scales and zero points of a format may be of one type.
    words = Counter(text.lower().split("-"))
    fitting = [fmt for fmt in backend.formats if words <= Counter(label(fmt).split("-"))]
    if not fitting:
        known = ", ".join(label(fmt) for fmt in backend.formats)
        raise ValueError(f"{backend.name} has no format {text!r}; it has {known}")
    # The plainest that fits: "g32" means the one without zero points.
    return min(fitting, key=lambda fmt: len(label(fmt).split("-")))


def _random_blocks(tensor: torch.Tensor, element: str, seed: int) -> Bytes:
    """Return blocks of the tensor's shape and size: there are no encoders for most types."""
    n, k = tensor.shape
    seeds = [seed, n, k, int(tensor[0, 0].view(torch.int16))]
    rng = np.random.default_rng([value & 0xFFFF for value in seeds])
    return random_blocks(element, (n, k), float(tensor.abs().max()), rng)


def prepare(made: Recipe, experts: Sequence[ExpertWeights]) -> list[Expert]:
    """Quantise experts once, for any number of layers."""
    return [made.expert(expert) for expert in experts]
