"""Opens a folder of safetensors files, and finds the experts of its layers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.checkpoint.reader import CheckpointReader
from ktk.checkpoint.safetensors.check import Checker
from ktk.checkpoint.safetensors.find import Finder
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.layer import SafetensorsLayer
from ktk.errors import CheckpointError


class SafetensorsCheckpoint(CheckpointReader):
    """A folder with config.json and safetensors files, seen as layers of experts.

    Parameters
    ----------
    path
        The folder.
    module
        The module that has the experts, where several do; by default the language model.
    activation
        The activation function, if not what config.json says.
    """

    def __init__(
        self, path: str | Path, module: str | None = None, activation: str | None = None
    ) -> None:
        self.path = Path(path)
        self.config: ExpertConfig = read_config(self.path, module, activation)
        self.index = TensorIndex(self.path)
        self._finder = Finder(self.index, self.config, module)
        self._checker = Checker(self.index, lambda: self._finder.locations)

    def files(self) -> list[Path]:
        """Return config.json, and the files that hold the tensors."""
        return [self.path / "config.json", *self.index.paths()]

    def layers(self) -> list[int]:
        """Return the layers that have experts of a family ktk knows; one at least."""
        numbers = self._finder.numbers()
        if not numbers:
            raise CheckpointError(self._finder.no_experts())
        return numbers

    def layer(self, number: int) -> SafetensorsLayer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        found = self._finder.find(number)
        self._checker.check(found)
        return SafetensorsLayer(self.index, found)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        self.index.close()

    def tensor_sizes(self) -> dict[str, int]:
        """Return the bytes of all tensors by name; reads the headers of all files."""
        return {name: self.index.nbytes(name) for name in self.index.names()}

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, without the weights, and yield what is wrong."""
        for path in self.index.paths():
            try:
                self.index.look_at(path)
            except CheckpointError as error:
                yield error

    def examine(self, number: int) -> tuple[SafetensorsLayer | None, list[CheckpointError]]:
        """Do what `layer` does, but return all errors, and None where there is no layer."""
        try:
            found = self._finder.find(number)
        except CheckpointError as error:
            return None, [error]
        return SafetensorsLayer(self.index, found), list(self._checker.faults(found))
