"""Opens GGUF files, and finds the experts of their layers."""

from __future__ import annotations

import math
from pathlib import Path

from ktk.checkpoint.gguf.architectures import Metadata
from ktk.checkpoint.gguf.blocks import is_known, row_nbytes
from ktk.checkpoint.gguf.layer import GgufLayer
from ktk.checkpoint.gguf.layout import Layers
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.checkpoint.reader import CheckpointReader


class GgufCheckpoint(CheckpointReader):
    """A model in one or more GGUF files, seen as layers of experts.

    Parameters
    ----------
    path
        A file, any file of a split model, or a folder that holds one model.
    activation
        What is computed, where the architecture is one that ktk does not know.
    top_k
        Experts that a token goes to, where the metadata does not say it.
    """

    def __init__(
        self, path: str | Path, activation: str | None = None, top_k: int | None = None
    ) -> None:
        self.path = Path(path)
        self.tensors = TensorSet(self.path)
        metadata = Metadata(self.path, self.tensors.fields, activation, top_k)
        self._layers = Layers(self.tensors, metadata)

    def files(self) -> list[Path]:
        """Return the files of the model."""
        return self.tensors.paths()

    def layers(self) -> list[int]:
        """Return the layers that have experts."""
        return self._layers.numbers()

    def layer(self, number: int) -> GgufLayer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        return GgufLayer(self.tensors, self._layers.find(number))

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self.tensors.close()

    def tensor_sizes(self) -> dict[str, int]:
        """Return the bytes of all tensors by name; of types that ktk does not know, 0."""
        infos = ((name, self.tensors.info(name)) for name in self.tensors.names())
        return {
            name: math.prod(one.shape[:-1]) * row_nbytes(one) if is_known(one) else 0
            for name, one in infos
        }
