"""Finds a layer's experts by the tables of families and storage, and reads them one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.pieces import ELEMENTS, Piece, flat
from ktk.checkpoint.safetensors.check import Checker
from ktk.checkpoint.safetensors.families import Stored
from ktk.checkpoint.safetensors.find import Finder
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.names import Layer, is_bias, weight_parts
from ktk.checkpoint.safetensors.split import split_matrix, split_tensor
from ktk.checkpoint.safetensors.storage import PLAIN, StorageError
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.quantize import Quantized

if TYPE_CHECKING:
    from ktk.backend import Backend


class Checkpoint:
    """A folder with config.json and safetensors files, seen as layers of experts."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.config: ExpertConfig = read_config(self.folder)
        self.index = TensorIndex(self.folder)
        self._finder = Finder(self.index, self.config)
        self._checker = Checker(self.index)
        self._given: dict[int, Format] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.index.close()

    def files(self) -> list[Path]:
        """Return config.json, and the files that hold the tensors."""
        return [self.folder / "config.json", *self.index.paths()]

    def layers(self) -> list[int]:
        """Return the layers that have experts of a family ktk knows; one at least."""
        numbers = self._finder.numbers()
        if not numbers:
            raise CheckpointError(self._finder.no_experts())
        return numbers

    def config_of(self, layer: Layer) -> ExpertConfig:
        """Return sizes and activation function of a layer: the same for all."""
        return self.config

    def layer(self, number: int) -> Layer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        found = self._finder.find(number)
        self._checker.check(found)
        return found

    def expert(self, layer: Layer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert.

        Returns
        -------
        dict[str, Tensor]
            gate and up [I, H], down [H, I], with _scale and _zero where they are quantised, and
            gate_bias, up_bias [I], down_bias [H] where the model has them: the arguments of
            `MoE.load_expert`, beside the format that `given` returns. Contiguous.
        """
        tensors = self.biases(layer, number)
        for name, matrix in self.matrices(layer, number).items():
            tensors[name] = matrix.data
            if matrix.scale is not None:
                tensors[name + "_scale"] = matrix.scale
            if matrix.zero is not None:
                tensors[name + "_zero"] = matrix.zero
        return tensors

    def values(
        self, layer: Layer, number: int, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """Read what one expert means, as floats: weights and biases."""
        tensors = {name: bias.to(dtype) for name, bias in self.biases(layer, number).items()}
        for name, matrix in self.matrices(layer, number).items():
            tensors[name] = matrix.dequantize(dtype)
        return tensors

    def pieces(self, layer: Layer, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        for part, stored in layer.family.parts.items():
            names = [("data", layer.name(part, number))]
            if not is_bias(part):
                names = list(self._names_of(layer, part, number))
            for role, name in names:
                dtype = self.index.dtype(name)
                # Exponents of MX formats may be called bytes.
                element = "ue8m0" if (role, dtype) == ("scale", "U8") else ELEMENTS.get(dtype, "")
                tensor = self.index.tensor(name, number if stored.fused else None)
                yield Piece(name, self.index.file(name), element, flat(tensor))

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, without the weights, and yield what is wrong."""
        for path in self.index.paths():
            try:
                self.index.look_at(path)
            except CheckpointError as error:
                yield error

    def examine(self, number: int) -> tuple[Layer | None, list[CheckpointError]]:
        """Do what `layer` does, but return all errors, and None where there is no layer."""
        try:
            found = self._finder.find(number)
        except CheckpointError as error:
            return None, [error]
        return found, list(self._checker.faults(found))

    def check_expert(self, layer: Layer, number: int) -> None:
        """Raise what reading an expert would, beyond what its tensors are one by one."""
        if layer.scheme is PLAIN:
            self.biases(layer, number)
        else:
            self.expert(layer, number)

    def has_floats(self, layer: Layer) -> bool:
        """Whether the matrices are not quantised."""
        return bool(self.given(layer).scale == "none")

    def storage(self, layer: Layer) -> tuple[str, str]:
        """Name the naming scheme and the element type, or the format, of the matrices."""
        given = self.given(layer)
        first = layer.name(next(iter(layer.family.parts)), 0)
        dtype = self.index.dtype(first) if given.scale == "none" else str(given)
        return layer.family.name, dtype

    def nbytes(self, layer: Layer) -> int:
        """Return the bytes of a layer's experts in the files."""
        return sum(self.index.nbytes(name) for name in layer.names() if name in self.index)

    def formats(self, layer: Layer) -> dict[str, Matrix]:
        """Return what gate, up and down are stored as."""
        given = self.given(layer)
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        gate = Matrix(given, inner, hidden)
        return {"gate": gate, "up": gate, "down": Matrix(given, hidden, inner)}

    def formats_for(self, layer: Layer, backend: Backend) -> dict[str, Matrix]:
        """Return what `reader` gives a backend: what is stored, or an error."""
        formats = self.formats(layer)
        for matrix in formats.values():
            if reason := matrix.refusal(backend):
                name = layer.first_name
                raise CheckpointFormatError(f"{self.index.where(name)}: {reason}")
        return formats

    def recorded_backend(self, layer: Layer) -> None:
        """Say that the files were made for no backend in particular."""

    def release(self) -> None:
        """Close the files; reading goes on."""
        self.index.close()

    def reader(self, layer: Layer, backend: Backend) -> Callable[[int], dict[str, Any]]:
        """Return what reads an expert for `MoE.load_expert`.

        Raises
        ------
        CheckpointFormatError
            The backend does not take what is stored.
        """
        given = self.formats_for(layer, backend)["gate"].format
        return lambda number: {**self.expert(layer, number), "given": given}

    def given(self, layer: Layer) -> Format:
        """Return the format of a layer's matrices; reads the scales of one, the first time."""
        if layer.number not in self._given:
            matrices = self._read(layer, layer.first, 0, values=False)
            self._given[layer.number] = next(iter(matrices.values())).format
        return self._given[layer.number]

    def matrices(self, layer: Layer, number: int) -> dict[str, Quantized]:
        """Read gate, up and down of one expert, in the format that `given` returns."""
        given = self.given(layer)
        matrices: dict[str, Quantized] = {}
        for part in weight_parts(layer.family):
            found = self._read(layer, part, number)
            for matrix in found.values():
                # One format is given for all: arrays of another would be read as what they are not.
                if matrix.format != given:
                    raise CheckpointError(
                        f"{self.index.where(layer.name(part, number))} is stored as "
                        f"{matrix.format}, but {layer.first_name} as {given}"
                    )
            matrices.update(found)
        return matrices

    def biases(self, layer: Layer, number: int) -> dict[str, torch.Tensor]:
        """Read the biases of one expert."""
        tensors: dict[str, torch.Tensor] = {}
        for part, stored in layer.family.parts.items():
            if is_bias(part):
                expert = number if stored.fused else None
                tensor = self.index.tensor(layer.name(part, number), expert)
                tensors.update(self._split(part, tensor, stored))
            elif f"{part}_bias" not in layer.family.parts:
                self._check_no_bias(layer, part, number)
        return tensors

    # --- reading --------------------------------------------------------------------------------

    def _read(
        self, layer: Layer, part: str, number: int, *, values: bool = True
    ) -> dict[str, Quantized]:
        """Read one part: gate and up are two matrices of one.

        Without `values`, a stand-in is in the place of the elements, which are most of the bytes.
        """
        stored = layer.family.parts[part]
        read_data = self.index.tensor if values else self.index.stand_in
        expert = number if stored.fused else None
        if layer.scheme is PLAIN:
            tensor = read_data(layer.name(part, number), expert)
            tensors = self._split(part, tensor, stored)
            layout = layer.layout(part)
            return {name: PLAIN.decode({"data": t}, layout) for name, t in tensors.items()}
        arrays = {
            role: (read_data if role == "data" else self.index.tensor)(name, expert)
            for role, name in self._names_of(layer, part, number)
        }
        try:
            matrix = layer.scheme.decode(arrays, layer.layout(part))
            return split_matrix(part, matrix, stored)
        except StorageError as error:
            raise CheckpointError(f"{self.index.where(layer.name(part, number))} {error}") from None

    def _split(self, part: str, tensor: torch.Tensor, stored: Stored) -> dict[str, torch.Tensor]:
        axes = stored.axes.split()
        return split_tensor(part, tensor, axes[1:] if stored.fused else axes)

    def _check_no_bias(self, layer: Layer, part: str, number: int) -> None:
        """Refuse a bias where the family has none: without it the experts are others."""
        stored = layer.family.parts[part]
        name = layer.bias_name(part, number)
        if name not in self.index:
            return
        if self.index.tensor(name, number if stored.fused else None).float().any():
            raise CheckpointError(
                f"{self.index.where(name)} is a bias, and ktk knows none of experts that are named "
                f"so ({layer.family.name})"
            )

    def _names_of(self, layer: Layer, part: str, number: int) -> Iterator[tuple[str, str]]:
        """Yield the tensors of a matrix that are there."""
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, number, role)
            if not piece.optional or name in self.index:
                yield role, name
