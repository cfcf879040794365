"""Reads the experts of a layer of safetensors files, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial

import torch

from ktk._core import Format
from ktk.checkpoint.dtypes import ELEMENTS
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.pieces import Piece, flat
from ktk.checkpoint.reader import LayerReader, Storage, decoded
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.integers import out_of_order
from ktk.checkpoint.safetensors.names import LayerNames, is_bias, weight_parts
from ktk.checkpoint.safetensors.scheme import FLOAT, Header, StorageError, Told
from ktk.checkpoint.safetensors.split import split_tensor
from ktk.checkpoint.safetensors.storage import PLAIN
from ktk.checkpoint.safetensors.tensors import decoded_part
from ktk.errors import CheckpointError
from ktk.expert import Expert, Matrix
from ktk.formats import label
from ktk.unread import Unread, UnreadExpert


class SafetensorsLayer(LayerReader):
    """The experts of one layer, under the names that were found for them."""

    def __init__(self, index: TensorIndex, names: LayerNames) -> None:
        self.number = names.number
        self.config = names.config
        self.names = names
        self._index = index

    @cached_property
    def format(self) -> Format:
        """The format of all matrices; reads the scales of one, the first time.

        Tensors that may leave a matrix without a format are read of all.
        """
        if self.names.scheme.decoded_if and any(
            self._needs_decoding(part, expert) for part, expert in self.names.tensors()
        ):
            return FLOAT
        if self.names.scheme.tell is not None:
            return self._told.format
        matrices = self._matrices_of(self.names.first, 0, self._index.stand_in)
        fmt = next(iter(matrices.values())).format
        assert fmt is not None, "schemes know what they decode"
        return fmt

    @property
    def decodes(self) -> bool:
        return self.names.scheme is not PLAIN and self.format == FLOAT

    @property
    def decoded_because(self) -> str:
        return self._told.why if self.names.scheme.tell is not None else ""

    @cached_property
    def _told(self) -> Told:
        """What all matrices are read as, each having been asked."""
        found = Told(FLOAT)
        for part, expert in self.names.tensors():
            if is_bias(part):
                continue
            one = self._told_of(part, expert)
            if one.why:
                return one
            if found.format not in (FLOAT, one.format):
                both = " and ".join(sorted((label(found.format), label(one.format))))
                return Told(FLOAT, f"whose matrices differ: {both}")
            found = one
        return found

    def _told_of(self, part: str, expert: int) -> Told:
        tell, index, names = self.names.scheme.tell, self._index, dict(self._names_of(part, expert))
        assert tell is not None
        headers = {
            role: Header(index.dtype(name), index.shape(name)) for role, name in names.items()
        }
        return tell(headers, self.names.layout(part), lambda role: index.tensor(names[role]))

    @cached_property
    def formats(self) -> Mapping[str, MatrixInfo]:
        """What gate, up and down are stored as."""
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        return {part: MatrixInfo(self.format, *sizes[part]) for part in self.config.parts}

    @property
    def file_formats(self) -> Mapping[str, Format]:
        """The formats in the files: a matrix with one scale is read as if every row had it."""
        fmt = self.format
        if "scale" in self.names.scheme.tensors and fmt.group_n == 1:
            shape = self._index.shape(self.names.name(self.names.first, 0, "scale"))
            if max(shape, default=1) == 1:
                fmt = Format(fmt.element, fmt.scale, fmt.zero, 0, 0)
        return dict.fromkeys(self.config.parts, fmt)

    @cached_property
    def orders(self) -> tuple[str, ...]:
        """Those of gate, up and down whose columns are sorted; reads which group each is of."""
        if self.format == FLOAT or "order" not in self.names.scheme.tensors:
            return ()
        found: dict[str, None] = {}
        for part, expert in self.names.tensors():
            if is_bias(part) or not self._sorts(part, expert):
                continue
            found |= dict.fromkeys(("gate", "up") if part == "gate_up" else (part,))
        return tuple(part for part in self.config.parts if part in found)

    def _sorts(self, part: str, expert: int) -> bool:
        name = self.names.name(part, expert, "order")
        return name in self._index and out_of_order(
            self._index.tensor(name), self.names.layout(part)
        )

    @property
    def storage(self) -> Storage:
        """The naming scheme, and the element type, format or scheme of the matrices."""
        if self.decodes:
            dtype = self.names.scheme.name
        elif self.format.scale == "none":
            dtype = self._index.dtype(self.names.first_name)
        else:
            dtype = str(self.format)
        return Storage(self.names.family.name, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all experts in the files."""
        index = self._index
        return sum(index.nbytes(name) for name in self.names.names() if name in index)

    def pieces(self, number: int) -> Iterator[Piece]:
        """Read one expert byte by byte: its part of each tensor."""
        for part in self.names.family.parts:
            named = [("data", self.names.name(part, number))]
            if not is_bias(part):
                named = list(self._names_of(part, number))
            for role, name in named:
                dtype = self._index.dtype(name)
                # Exponents of MX formats may be called bytes.
                element = "ue8m0" if (role, dtype) == ("scale", "U8") else ELEMENTS.get(dtype, "")
                tensor = self._index.tensor(name, *self._place(part, number))
                yield Piece(name, self._index.file(name), element, flat(tensor))

    def check_expert(self, number: int) -> None:
        """Raise what reading an expert would, beyond what its tensors are one by one."""
        if self.names.scheme is PLAIN:
            self._biases(number)
        else:
            self._read(number)

    def where(self, part: str, expert: int = 0) -> str:
        """Name a matrix and its file, for messages."""
        stored = part if part in self.names.family.parts else "gate_up"
        return self._index.where(self.names.name(stored, expert))

    def unread(self, number: int) -> UnreadExpert:
        """Read one expert but for elements that are stored as they are given."""
        later = Unread()
        return UnreadExpert.of(self._read(number, later), later)

    def _read(self, number: int, later: Unread | None = None) -> Expert:
        biases = self._biases(number)
        matrices: dict[str, Matrix] = {}
        for part in weight_parts(self.names.family):
            read = self._index.tensor
            if later is not None and part in self._passed_on:
                read = partial(read, later=later)
            for name, matrix in self._matrices_of(part, number, read).items():
                if self.decodes:
                    matrix = decoded(matrix, self.where(part, number))
                # One format is said of all: arrays of another would be read as what they are not.
                if matrix.format != self.format:
                    raise CheckpointError(
                        f"{self.where(part, number)} is stored as {matrix.format}, but "
                        f"{self.names.first_name} as {self.format}"
                    )
                matrices[name] = replace(matrix, bias=biases.get(f"{name}_bias"))
        return Expert(**matrices)

    @cached_property
    def _passed_on(self) -> Collection[str]:
        """The parts whose elements are given as they lie in the files, and are not looked at.

        A tensor without values is read in their place: what becomes of it shows that.
        """
        if self.decodes or self.orders or self.names.scheme.tell is not None:
            return ()
        return [part for part in weight_parts(self.names.family) if self._passes_on(part)]

    def _passes_on(self, part: str) -> bool:
        made: list[torch.Tensor] = []

        def stand_in(name: str, *place: int | None) -> torch.Tensor:
            made.append(self._index.stand_in(name, *place))
            return made[-1]

        try:
            with torch.inference_mode(mode=False):  # in which tensors have no versions
                matrices = self._matrices_of(part, 0, stand_in).values()
        except CheckpointError:  # of an expert that nobody may want
            return False
        [elements] = made
        memory = elements.untyped_storage()._cdata
        return elements._version == 0 and all(
            matrix.data.untyped_storage()._cdata == memory and matrix.data.is_contiguous()
            for matrix in matrices
        )

    def _matrices_of(
        self, part: str, number: int, read: Callable[..., torch.Tensor]
    ) -> dict[str, Matrix]:
        """Read one part: gate and up are two matrices of one.

        `read` reads the elements, which are most of the bytes, or returns a stand-in for them.
        """
        names = self.names
        stored = names.family.parts[part]
        place = self._place(part, number)
        arrays = {
            role: (read if role == "data" else self._index.tensor)(name, *place)
            for role, name in self._names_of(part, number)
        }
        try:
            return decoded_part(part, names.scheme, arrays, names.layout(part), stored)
        except StorageError as error:
            raise CheckpointError(f"{self.where(part, number)} {error}") from None

    def _needs_decoding(self, part: str, expert: int) -> bool:
        """Whether what a matrix's tensors hold is of no format."""
        if is_bias(part):
            return False
        layout = self.names.layout(part)
        return any(
            name in self._index and test(self._index.tensor(name), layout)
            for role, test in self.names.scheme.decoded_if.items()
            for name in [self.names.name(part, expert, role)]
        )

    def _biases(self, number: int) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for part, stored in self.names.family.parts.items():
            if is_bias(part):
                name = self.names.name(part, number)
                tensor = self._index.tensor(name, *self._place(part, number))
                tensors.update(split_tensor(part, tensor, stored.own))
        return tensors

    def _place(self, part: str, number: int) -> tuple[int | None, int | None]:
        """Return where an expert is in a tensor of a part, as `TensorIndex.tensor` takes it."""
        stored = self.names.family.parts[part]
        if not stored.fused:
            return None, None
        return number, self.config.num_experts if stored.joined else None

    def _names_of(self, part: str, number: int) -> Iterator[tuple[str, str]]:
        """Yield the tensors of a matrix that are there."""
        for role, piece in self.names.scheme.tensors.items():
            name = self.names.name(part, number, role)
            if not piece.optional or name in self._index:
                yield role, name
