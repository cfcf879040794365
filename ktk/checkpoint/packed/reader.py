"""Opens a folder of packed files as a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from weakref import WeakSet

from ktk.checkpoint.detect import PACKED_INDEX
from ktk.checkpoint.packed.folder import file_of, read_index
from ktk.checkpoint.packed.layer import PackedLayer, open_layer
from ktk.checkpoint.reader import CheckpointReader
from ktk.errors import CheckpointError


class PackedCheckpoint(CheckpointReader):
    """A folder that `ktk convert` made, seen as layers of experts."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.index = read_index(self.path)
        self._opened: WeakSet[PackedLayer] = WeakSet()

    def files(self) -> list[Path]:
        """Return the files that hold the weights."""
        return [file_of(self.path, layer) for layer in self.layers()]

    def layers(self) -> list[int]:
        """Return the layers of the conversion."""
        return sorted(self.index.layers)

    def layer(self, number: int) -> PackedLayer:
        """Open the file of a layer."""
        if number not in self.index.layers:
            raise CheckpointError(
                f"{self.path} has no layer {number}; it was made with the layers "
                f"{', '.join(map(str, self.layers()))}"
            )
        path = file_of(self.path, number)
        layer = open_layer(path)
        for what in ("backend", "source"):
            if getattr(layer.header, what) != getattr(self.index, what):
                raise CheckpointError(
                    f"{path} is of another conversion than the rest of the folder: its {what} is "
                    f"{getattr(layer.header, what)}, not {getattr(self.index, what)}"
                )
        if layer.number != number:
            raise CheckpointError(f"{path} holds layer {layer.number}, its name says {number}")
        self._opened.add(layer)
        return layer

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for layer in list(self._opened):
            layer.close()

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, and yield those that are none of the conversion."""
        mine = {path.name for path in self.files()}
        for path in sorted(self.path.glob("layer-*.safetensors")):
            if path.name not in mine:
                yield CheckpointError(
                    f"{path} is none of the layers that {self.path / PACKED_INDEX} lists"
                )
