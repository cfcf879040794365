"""Says what a checkpoint holds, reading its headers and no more than one matrix."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ktk.checkpoint.config import ExpertConfig, widths_differ
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.spans import spans
from ktk.errors import CheckpointError


@dataclass(frozen=True)
class Description:
    """The routed experts of a checkpoint.

    Attributes
    ----------
    path
        The folder, or the GGUF file.
    config
        Sizes and activation function, from config.json or the metadata.
    layers
        The layers that have experts.
    family
        The naming scheme of the first of them.
    dtype
        The element type of their weights, as safetensors or ggml spells it; of quantised
        safetensors the format.
    """

    path: Path
    config: ExpertConfig
    layers: tuple[int, ...]
    family: str
    dtype: str

    def __str__(self) -> str:
        config = self.config
        zero = f" and {config.zero_expert_num} zero experts" if config.zero_expert_num else ""
        inner, outer = config.hidden_size, config.model_hidden_size
        widths = "" if outer is None else f"; {widths_differ(inner, outer)}"
        return (
            f"{config.model_type}: {config.num_experts} experts of {config.hidden_size} x "
            f"{config.intermediate_size}{zero}, {config.num_experts_per_tok} per token, "
            f"{self.dtype}, "
            f"in layers {spans(list(self.layers))}{widths}"
        )


def describe(
    path: str | Path,
    *,
    module: str | None = None,
    activation: str | None = None,
    top_k: int | None = None,
) -> Description:
    """Return what routed experts a checkpoint has; options as of `open_checkpoint`.

    Raises
    ------
    CheckpointError
        There are none, or the first layer that has any is incomplete or damaged.
    """
    with open_checkpoint(path, module=module, activation=activation, top_k=top_k) as checkpoint:
        layers = checkpoint.layers()
        if not layers:
            raise CheckpointError(f"{path} has no experts that ktk knows by name")
        layer = checkpoint.layer(layers[0])
        return Description(
            path=Path(path),
            config=layer.config,
            layers=tuple(layers),
            family=layer.storage.family,
            dtype=layer.storage.dtype,
        )
