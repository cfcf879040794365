"""Says what a checkpoint holds, reading its headers and no more than one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.experts import Checkpoint, spans
from ktk.errors import CheckpointError


@dataclass(frozen=True)
class Description:
    """The routed experts of a checkpoint.

    Attributes
    ----------
    path
        The folder.
    config
        Sizes and activation function, from config.json.
    layers
        The layers that have experts.
    family
        The naming scheme of the first of them.
    dtype
        The element type of their weights, as safetensors spells it; of quantised ones the format.
    """

    path: Path
    config: ExpertConfig
    layers: tuple[int, ...]
    family: str
    dtype: str

    def __str__(self) -> str:
        config = self.config
        return (
            f"{config.model_type}: {config.num_experts} experts of {config.hidden_size} x "
            f"{config.intermediate_size}, {config.num_experts_per_tok} per token, {self.dtype}, "
            f"in layers {spans(list(self.layers))}"
        )


def describe(path: str | Path) -> Description:
    """Return what routed experts a checkpoint has.

    Raises
    ------
    CheckpointError
        There are none, or the first layer that has any is incomplete or damaged.
    """
    with Checkpoint(path) as checkpoint:
        layers = checkpoint.layers()
        if not layers:
            raise CheckpointError(f"{checkpoint.folder} has no experts that ktk knows by name")
        layer = checkpoint.layer(layers[0])
        given = checkpoint.given(layer)
        first = layer.name(next(iter(layer.family.parts)), 0)
        return Description(
            path=checkpoint.folder,
            config=checkpoint.config,
            layers=tuple(layers),
            family=layer.family.name,
            dtype=checkpoint.index.dtype(first) if given.scale == "none" else str(given),
        )
