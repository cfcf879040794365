"""Layers of a model of the user's own, to be timed as the named shapes are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktk.bench.shapes import Shape
from ktk.checkpoint import open_checkpoint
from ktk.loading import default_backend
from ktk.loading.load import load_layers
from ktk.loading.plan import plan_layer
from ktk.model import layers_of
from ktk.system import available_memory

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.moe import MoE


@dataclass(frozen=True)
class ModelLayers:
    """What is to be timed of a checkpoint.

    Attributes
    ----------
    path
        Of the checkpoint.
    shape
        Of each of the layers; its name is that of the checkpoint.
    numbers
        The layers that may be loaded, all of that shape.
    total
        How many layers of the model have experts.
    default_backend
        What computes the first of them where nobody asks for another backend.
    reading
        Options of `open_checkpoint`.
    """

    path: Path
    shape: Shape
    numbers: tuple[int, ...]
    total: int
    default_backend: str
    reading: dict[str, Any]


def open_model(path: Path, layers: Sequence[int] | None = None, **reading: Any) -> ModelLayers:
    """Read the headers of a checkpoint.

    Parameters
    ----------
    path
        As of `ktk.MoE.from_checkpoint`.
    layers
        Which to time. By default all that are of the first one's shape: as many are loaded as it
        takes to stream weights from memory.
    **reading
        Options of `open_checkpoint`.

    Raises
    ------
    CheckpointError
        There are no experts, or not in one of the layers.
    ValueError
        The layers asked for differ in their sizes.
    """
    with open_checkpoint(path, **reading) as checkpoint:
        all_of_model = layers_of(checkpoint, path)
        numbers = list(dict.fromkeys(layers or all_of_model))
        configs = {number: checkpoint.layer(number).config for number in numbers}
        first = configs[numbers[0]]
        alike = [number for number in numbers if configs[number] == first]
        if layers and len(alike) < len(numbers):
            [other, *_] = [number for number in numbers if number not in alike]
            raise ValueError(f"layers {numbers[0]} and {other} differ in size: time one of them")
        return ModelLayers(
            path=path,
            shape=Shape(name=path.resolve().name, **vars(first.layer())),
            numbers=tuple(alike),
            total=len(all_of_model),
            default_backend=default_backend(checkpoint.layer(numbers[0])).name,
            reading=reading,
        )


def load_model(
    model: ModelLayers, backend: Backend, wanted_bytes: int, **options: Any
) -> list[MoE]:
    """Load layers until so many bytes are packed, or no more fit into 60 % of the free memory.

    Raises
    ------
    MemoryError
        Not even one layer fits.
    CheckpointError
        A layer is damaged, or the backend does not take what it holds.
    """
    budget = int(0.6 * available_memory())
    loaded: list[MoE] = []
    with open_checkpoint(model.path, **model.reading) as checkpoint:
        for number in model.numbers:
            packed = sum(moe.nbytes for moe in loaded)
            plan = plan_layer(checkpoint, number, backend, None, None, options)
            needed = plan.route.packed_nbytes * len(plan.slots)
            if loaded and (packed >= wanted_bytes or packed + needed > budget):
                break
            if needed > budget:
                raise MemoryError(
                    f"layer {number} of {model.path} takes {needed / 1e9:.1f} GB as {backend.name} "
                    f"packs it, which is more than 60 % of the free memory ({budget / 1e9:.1f} GB)"
                )
            loaded += load_layers(checkpoint, [plan]).values()
    return loaded
