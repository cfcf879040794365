"""Reads the packed file of one layer; every byte is checked before it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.files import MissingFile
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.packed.codec import unpack
from ktk.checkpoint.packed.header import Header, HeaderDamage, HeaderError, checksum, from_metadata
from ktk.checkpoint.packed.layout import Layout, PackedSpec, extents
from ktk.checkpoint.packed.write import bytes_of
from ktk.checkpoint.pieces import Piece, flat
from ktk.checkpoint.reader import LayerReader, Storage
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.errors import BackendError, CheckpointError
from ktk.expert import Expert

_AGAIN = "ktk convert --resume converts the layer again"


class DamagedLayer(CheckpointError):
    """A packed file is not as it was written."""


class PackedLayer(LayerReader):
    """One file whose header fits its tensors and its size; `open_layer` makes it."""

    def __init__(self, file: TensorFile, header: Header) -> None:
        self.number = header.layer
        self.config = header.layout.config
        self.recorded_backend = header.backend
        self.header = header
        self._file = file

    @property
    def path(self) -> Path:
        """Of the file."""
        return self._file.path

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the file."""
        return self.header.layout.nbytes

    @property
    def formats(self) -> Mapping[str, MatrixInfo]:
        """What gate, up and down are stored as."""
        formats = self.header.layout.formats.items()
        return {part: MatrixInfo(fmt, *extents(self.config, part)) for part, fmt in formats}

    @property
    def storage(self) -> Storage:
        """The container, and the formats of gate, up and down without repetition."""
        formats = dict.fromkeys(map(str, self.header.layout.formats.values()))
        return Storage(f"packed for {self.recorded_backend}", ", ".join(formats))

    @property
    def orders(self) -> tuple[str, ...]:
        return self.header.layout.orders

    def pieces(self, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        elements, checksums = element_of(self.header.layout), self.header.checksums
        for name in self.header.layout.specs:
            data = flat(self._bytes(name, number))
            yield Piece(name, self.path, elements.get(name, "f32"), data, checksums[name][number])

    def check_expert(self, number: int) -> None:
        """Look at what is packed, of which checksums do not say whether it is finite."""
        if not self.header.layout.packed:
            return
        matrices = self._read(number).matrices
        for part in self.header.layout.packed:
            fmt, matrix = self.formats[part].format, matrices[part]
            for element, array in ((fmt.element, matrix.data), (fmt.scale, matrix.scale)):
                if array is None:
                    continue
                for fault in Piece(part, self.path, element, flat(array)).faults():
                    raise CheckpointError(f"{self.where(part, number)}: {fault}")

    def where(self, part: str, expert: int = 0) -> str:
        """Name a matrix and its file, for messages."""
        return f"{part} of expert {expert} in {self.path}"

    def refused(self, part: str, backend: str, reason: str) -> str:
        """Say that a backend does not take a matrix as it is stored, and why."""
        return (
            f"{self.path} was converted for the backend {self.recorded_backend}, and {backend} "
            f"does not take it as it is: {reason}"
        )

    def verify(self) -> None:
        """Read the whole file; raises DamagedLayer where a checksum is wrong."""
        for number in range(self.config.num_experts):
            self._read(number)
        self.close()

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._file.close()

    def _read(self, number: int) -> Expert:
        """Read an expert, whose checksums are right."""
        layout = self.header.layout
        tensors: dict[str, torch.Tensor] = {}
        for name, spec in layout.specs.items():
            found = self._bytes(name, number)
            self._check(name, number, found)
            if isinstance(spec, PackedSpec):
                tensors |= self._unpacked(name, spec.layout, found, self.where(name, number))
            else:
                tensors[name] = found.view(spec.torch_dtype).reshape(spec.shape)
        for part in layout.orders:
            order = tensors[f"{part}_order"]
            if not torch.equal(
                order.sort().values, torch.arange(len(order), dtype=order.dtype, device="cpu")
            ):
                where = self.where(part, number)
                raise DamagedLayer(f"{where} has an order that lacks columns; {_AGAIN}")
        return layout.expert(tensors)

    def _bytes(self, name: str, number: int) -> torch.Tensor:
        return self._file.read_bytes(name, *self.header.layout.specs[name].place(number))

    def _unpacked(
        self, part: str, layout: str, data: torch.Tensor, where: str
    ) -> dict[str, torch.Tensor]:
        try:
            made = unpack(self.header.backend, layout, self.formats[part], data)
        except BackendError as error:
            raise CheckpointError(f"{where} is packed, and cannot be read: {error}") from error
        except ValueError as error:
            raise DamagedLayer(f"{where} is damaged: {error}; {_AGAIN}") from error
        arrays = {part: made.data, f"{part}_scale": made.scale, f"{part}_zero": made.zero}
        return {name: array for name, array in arrays.items() if array is not None}

    def _check(self, name: str, number: int, tensor: torch.Tensor) -> None:
        found, written = checksum(bytes_of(tensor)), self.header.checksums[name][number]
        if found != written:
            raise DamagedLayer(
                f"{self.path} is damaged: tensor {name} of expert {number} has the checksum "
                f"{found:016x}, and was written with {written:016x}; {_AGAIN}"
            )


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


def element_of(layout: Layout) -> dict[str, str]:
    """Return what the tensors of a file hold; biases and factors, which are f32, are left out."""
    found: dict[str, str] = {}
    for part, fmt in layout.formats.items():
        if part in layout.orders:
            found[f"{part}_order"] = ""
        if part in layout.packed:
            found[part] = ""
            continue
        found |= {part: fmt.element, f"{part}_zero": ""}
        if fmt.scale != "none":
            found[f"{part}_scale"] = fmt.scale
    return found


def _check_tensors(file: TensorFile, header: Header) -> None:
    experts = header.layout.config.num_experts
    for name, spec in header.layout.specs.items():
        info = file.tensors.get(name)
        if info is None:
            raise DamagedLayer(
                f"{file.path} lacks the tensor {name}, which its header speaks of; {_AGAIN}"
            )
        have, want = (info.dtype, info.shape), (spec.dtype, spec.all_shape(experts))
        if have != want:
            raise DamagedLayer(
                f"{file.path}: tensor {name} is {have[0]} {list(have[1])}, but its header means "
                f"{want[0]} {list(want[1])}; {_AGAIN}"
            )
