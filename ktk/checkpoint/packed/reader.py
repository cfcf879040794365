"""Reads a folder of packed files as a checkpoint; every byte is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.detect import PACKED_INDEX
from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.files import MissingFile
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.packed.folder import file_of, read_index
from ktk.checkpoint.packed.header import Header, HeaderDamage, HeaderError, checksum, from_metadata
from ktk.checkpoint.packed.layout import PARTS, Layout, extents, is_blocks
from ktk.checkpoint.packed.write import bytes_of, file_size
from ktk.checkpoint.pieces import Piece, flat
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.quantize import Quantized

if TYPE_CHECKING:
    from ktk.backend import Backend


_AGAIN = "ktk convert --resume converts the layer again"


class DamagedLayer(CheckpointError):
    """A packed file is not as it was written."""


@dataclass(frozen=True)
class PackedLayer:
    """One file whose header fits its tensors and its size."""

    file: TensorFile
    header: Header

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.file.path

    @property
    def number(self) -> int:
        """Number of the layer in the model."""
        return self.header.layer

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return file_size(self.header)


def open_layer(path: Path) -> PackedLayer:
    """Open a packed file, reading its header only.

    Raises
    ------
    CheckpointError
        It is missing, cannot be read, is of another version, or no packed file at all.
    DamagedLayer
        It is truncated or damaged.
    """
    try:
        file = TensorFile(path)
        header = from_metadata(file.metadata)
    except MissingFile as error:
        raise CheckpointError(
            f"{error}: the conversion did not get that far; run it again with --resume"
        ) from None
    except HeaderDamage as error:
        raise DamagedLayer(f"{path} {error}; {_AGAIN}") from None
    except HeaderError as error:
        raise CheckpointError(f"{path} {error}") from None
    except EntryError as error:
        raise DamagedLayer(f"{path} is damaged or truncated: {error}; {_AGAIN}") from error
    _check_tensors(file, header)
    return PackedLayer(file, header)


def _check_tensors(file: TensorFile, header: Header) -> None:
    experts = header.layout.config.num_experts
    for name, spec in header.layout.specs.items():
        info = file.tensors.get(name)
        if info is None:
            raise DamagedLayer(
                f"{file.path} lacks the tensor {name}, which its header speaks of; {_AGAIN}"
            )
        have, want = (info.dtype, info.shape), (spec.dtype, (experts, *spec.shape))
        if have != want:
            raise DamagedLayer(
                f"{file.path}: tensor {name} is {have[0]} {list(have[1])}, but its header means "
                f"{want[0]} {list(want[1])}; {_AGAIN}"
            )


def verify(layer: PackedLayer) -> None:
    """Read a whole file; raises DamagedLayer where a checksum is wrong."""
    for expert in range(layer.header.layout.config.num_experts):
        _read(layer, expert)
    layer.file.close()


def _read(layer: PackedLayer, number: int) -> dict[str, torch.Tensor]:
    """Read an expert, whose checksums are right."""
    arrays = {name: layer.file.read(name, number) for name in layer.header.layout.specs}
    for name, array in arrays.items():
        found, written = checksum(bytes_of(array)), layer.header.checksums[name][number]
        if found != written:
            raise DamagedLayer(
                f"{layer.path} is damaged: tensor {name} of expert {number} has the checksum "
                f"{found:016x}, and was written with {written:016x}; {_AGAIN}"
            )
    return arrays


class PackedCheckpoint:
    """A folder that `ktk convert` made, seen as layers of experts."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.index = read_index(self.folder)
        self._reading: set[TensorFile] = set()

    def __enter__(self) -> PackedCheckpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def files(self) -> list[Path]:
        """Return the files that hold the weights."""
        return [file_of(self.folder, layer) for layer in self.layers()]

    def layers(self) -> list[int]:
        """Return the layers of the conversion."""
        return sorted(self.index.layers)

    def layer(self, number: int) -> PackedLayer:
        """Open the file of a layer."""
        if number not in self.index.layers:
            raise CheckpointError(
                f"{self.folder} has no layer {number}; it was made with the layers "
                f"{', '.join(map(str, self.layers()))}"
            )
        path = file_of(self.folder, number)
        layer = open_layer(path)
        for what in ("backend", "source"):
            if getattr(layer.header, what) != getattr(self.index, what):
                raise CheckpointError(
                    f"{path} is of another conversion than the rest of the folder: its {what} is "
                    f"{getattr(layer.header, what)}, not {getattr(self.index, what)}"
                )
        if layer.number != number:
            raise CheckpointError(f"{path} holds layer {layer.number}, its name says {number}")
        return layer

    def config_of(self, layer: PackedLayer) -> ExpertConfig:
        """Return sizes and activation function of a layer."""
        return layer.header.layout.config

    def recorded_backend(self, layer: PackedLayer) -> str:
        """Name the backend that the layer was converted for."""
        return layer.header.backend

    def release(self) -> None:
        """Close the files; reading goes on."""
        for file in list(self._reading):
            file.close()
        self._reading.clear()

    def nbytes(self, layer: PackedLayer) -> int:
        """Return the bytes of a layer's experts in its file."""
        return layer.header.layout.nbytes

    def formats(self, layer: PackedLayer) -> dict[str, Matrix]:
        """Return what gate, up and down are stored as."""
        layout = layer.header.layout
        return {part: Matrix(layout.formats[part], *extents(layout.config, part)) for part in PARTS}

    def expert(self, layer: PackedLayer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert as it is stored; its checksums are right."""
        self._reading.add(layer.file)
        return _read(layer, number)

    def values(
        self, layer: PackedLayer, number: int, dtype: torch.dtype = torch.float64
    ) -> dict[str, torch.Tensor]:
        """Read what one expert means, as floats: weights and biases."""
        arrays = self.expert(layer, number)
        found = {}
        for part, fmt in layer.header.layout.formats.items():
            scale, zero = (arrays.get(f"{part}_{what}") for what in ("scale", "zero"))
            if is_blocks(fmt):
                found[part] = _blocks(fmt, arrays[part], scale, f"{part} in {layer.path}").to(dtype)
            else:
                found[part] = Quantized(fmt, arrays[part], scale, zero).dequantize(dtype)
        for part in layer.header.layout.biases:
            found[f"{part}_bias"] = arrays[f"{part}_bias"].to(dtype)
        return found

    def pieces(self, layer: PackedLayer, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        elements, checksums = element_of(layer.header.layout), layer.header.checksums
        self._reading.add(layer.file)
        for name in layer.header.layout.specs:
            data = flat(layer.file.read(name, number))
            yield Piece(name, layer.path, elements.get(name, "f32"), data, checksums[name][number])

    def faults(self) -> Iterator[CheckpointError]:
        """Look at the files themselves, and yield those that are none of the conversion."""
        mine = {path.name for path in self.files()}
        for path in sorted(self.folder.glob("layer-*.safetensors")):
            if path.name not in mine:
                yield CheckpointError(
                    f"{path} is none of the layers that {self.folder / PACKED_INDEX} lists"
                )

    def examine(self, number: int) -> tuple[PackedLayer | None, list[CheckpointError]]:
        """Do what `layer` does, but return the error, and None where there is no layer."""
        try:
            return self.layer(number), []
        except CheckpointError as error:
            return None, [error]

    def check_expert(self, layer: PackedLayer, number: int) -> None:
        """Do nothing: checksums say it all."""

    def has_floats(self, layer: PackedLayer) -> bool:
        """Whether the matrices are not quantised."""
        formats = layer.header.layout.formats.values()
        return all(fmt.element in ("f32", "f16", "bf16") for fmt in formats)

    def storage(self, layer: PackedLayer) -> tuple[str, str]:
        """Name the container, and the formats of gate, up and down without repetition."""
        formats = dict.fromkeys(str(fmt) for fmt in layer.header.layout.formats.values())
        return f"packed for {layer.header.backend}", ", ".join(formats)

    def formats_for(self, layer: PackedLayer, backend: Backend) -> dict[str, Matrix]:
        """Return what `reader` gives a backend: what is stored, or an error."""
        formats = self.formats(layer)
        for matrix in formats.values():
            if reason := _refusal(backend, matrix):
                raise CheckpointFormatError(
                    f"{layer.path} was converted for the backend {layer.header.backend}, and "
                    f"{backend.name} does not take it as it is: {reason}"
                )
        return formats

    def reader(self, layer: PackedLayer, backend: Backend) -> Callable[[int], dict[str, Any]]:
        """Return what reads an expert for `MoE.load_expert`.

        Any backend will do that stores the formats of the file as they are.

        Raises
        ------
        CheckpointFormatError
            The backend does not.
        """
        formats = self.formats_for(layer, backend)
        given = tuple(formats[part].format for part in PARTS)
        return lambda number: {**self.expert(layer, number), "given": given}


def element_of(layout: Layout) -> dict[str, str]:
    """Return what the tensors of a file hold; biases and factors, which are f32, are left out."""
    found: dict[str, str] = {}
    for part, fmt in layout.formats.items():
        found |= {part: fmt.element, f"{part}_zero": ""}
        if fmt.scale != "none":
            found[f"{part}_scale"] = fmt.scale
    return found


def _blocks(
    fmt: Format, data: torch.Tensor, factor: torch.Tensor | None, name: str
) -> torch.Tensor:
    """Decode blocks of ggml."""
    from ktk.checkpoint.gguf.blocks import Blocks

    scale = None if factor is None else float(factor)
    n, row_nbytes = data.shape
    return Blocks(data.numpy, (n, row_nbytes), fmt.element.upper(), scale, name).floats()


def _refusal(backend: Backend, matrix: Matrix) -> str:
    """Return why a backend does not store a matrix as it is; empty if it does."""
    try:
        stored = backend.core.stored_as(matrix.format, matrix.n, matrix.k)
    except ValueError as error:
        return str(error)
    same = stored.same_as(matrix.format, matrix.n, matrix.k)
    return "" if same else f"it would make {stored} of {matrix.format}"
