"""Finds a layer's experts by the tables of families and storage, and reads them one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ktk._core import Format
from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.checkpoint.families import FAMILIES, PREFIXES, Family, Stored
from ktk.checkpoint.index import TensorIndex
from ktk.checkpoint.matrix import Matrix
from ktk.checkpoint.split import split_matrix, split_tensor
from ktk.checkpoint.storage import PLAIN, SCHEMES, Layout, Part, Scheme, StorageError
from ktk.checkpoint.surplus import by_layer, surplus
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.quantize import Quantized

if TYPE_CHECKING:
    from ktk.backend import Backend


@dataclass(frozen=True)
class Layer:
    """The experts of one layer: which names they have, and how their matrices are stored.

    `group` is the number of columns that share a scale, where the scheme leaves it open; 0 for all.
    """

    number: int
    prefix: str
    family: Family
    scheme: Scheme
    group: int = 0

    def name(self, part: str, expert: int, role: str = "data") -> str:
        """Return the full name of a tensor of a part of an expert."""
        stored = self.family.parts[part]
        if part.endswith("_bias"):
            return self.prefix + stored.name.format(e=expert)
        stem = self.prefix + stored.stem.format(e=expert)
        name = self.scheme.name_of(role, stem, stored.fused)
        assert name is not None, "a scheme without shared tensors was not chosen for a fused family"
        return name


class Checkpoint:
    """A folder with config.json and safetensors files, seen as layers of experts."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.config: ExpertConfig = read_config(self.folder)
        self.index = TensorIndex(self.folder)
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
        """Return the layers that have experts of a family ktk knows."""
        found = (self._names.fullmatch(name) for name in self.index.names())
        return sorted({int(_group(match)) for match in found if match})

    def config_of(self, layer: Layer) -> ExpertConfig:
        """Return sizes and activation function of a layer: the same for all."""
        return self.config

    def layer(self, number: int) -> Layer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        found = self._find(number)
        for part, stored in found.family.parts.items():
            for expert in range(1 if stored.fused else self.config.num_experts):
                self._check(found, part, expert)
        self._check_count(found)
        self._check_surplus(found)
        return found

    def expert(self, layer: Layer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert.

        Returns
        -------
        dict[str, Tensor]
            gate and up [I, H], down [H, I], with _scale and _zero where they are quantised, and
            gate_bias, up_bias [I], down_bias [H] where the model has them: the arguments of
            `MoE.load_expert`, beside the format that `given` returns. Views of the mapped file
            where the layout allows, contiguous in any case.
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
        return sum(
            self.index.nbytes(name) for name in self._names_read(layer) if name in self.index
        )

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
                name = layer.name(_first(layer.family), 0)
                raise CheckpointFormatError(f"{self._where(name)}: {reason}")
        return formats

    def recorded_backend(self, layer: Layer) -> None:
        """Say that the files were made for no backend in particular."""

    def release(self) -> None:
        """Let go of what was read, so that it takes no memory."""
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
        """Return the format of a layer's matrices; reads one of them, the first time."""
        if layer.number not in self._given:
            matrices = self._read(layer, _first(layer.family), 0)
            self._given[layer.number] = next(iter(matrices.values())).format
        return self._given[layer.number]

    def matrices(self, layer: Layer, number: int) -> dict[str, Quantized]:
        """Read gate, up and down of one expert, in the format that `given` returns."""
        given = self.given(layer)
        matrices: dict[str, Quantized] = {}
        for part in _weights(layer.family):
            found = self._read(layer, part, number)
            for matrix in found.values():
                # One format is given for all: arrays of another would be read as what they are not.
                if matrix.format != given:
                    raise CheckpointError(
                        f"{self._where(layer.name(part, number))} is stored as {matrix.format}, "
                        f"but {layer.name(_first(layer.family), 0)} as {given}"
                    )
            matrices.update(found)
        return matrices

    def biases(self, layer: Layer, number: int) -> dict[str, torch.Tensor]:
        """Read the biases of one expert."""
        tensors: dict[str, torch.Tensor] = {}
        for part, stored in layer.family.parts.items():
            if part.endswith("_bias"):
                tensors.update(self._read_plain(layer, part, number, stored))
            elif f"{part}_bias" not in layer.family.parts:
                self._check_no_bias(layer, part, number)
        return tensors

    # --- reading --------------------------------------------------------------------------------

    def _read(self, layer: Layer, part: str, number: int) -> dict[str, Quantized]:
        """Read one part: gate and up are two matrices of one."""
        stored = layer.family.parts[part]
        if layer.scheme is PLAIN:
            tensors = self._read_plain(layer, part, number, stored)
            layout = self._layout(layer, part)
            return {name: PLAIN.decode({"data": t}, layout) for name, t in tensors.items()}
        expert = number if stored.fused else None
        arrays = {
            role: self.index.tensor(name, expert)
            for role, name in self._names_of(layer, part, number)
        }
        try:
            matrix = layer.scheme.decode(arrays, self._layout(layer, part))
            return split_matrix(part, matrix, stored)
        except StorageError as error:
            raise CheckpointError(f"{self._where(layer.name(part, number))} {error}") from None

    def _read_plain(
        self, layer: Layer, part: str, number: int, stored: Stored
    ) -> dict[str, torch.Tensor]:
        axes = stored.axes.split()
        tensor = self.index.tensor(layer.name(part, number), number if stored.fused else None)
        return split_tensor(part, tensor, axes[1:] if stored.fused else axes)

    def _check_no_bias(self, layer: Layer, part: str, number: int) -> None:
        """Refuse a bias where the family has none: without it the experts are others."""
        stored = layer.family.parts[part]
        name = self._bias_name(layer, part, number)
        if name not in self.index:
            return
        if self.index.tensor(name, number if stored.fused else None).float().any():
            raise CheckpointError(
                f"{self._where(name)} is a bias, and ktk knows none of experts that are named so "
                f"({layer.family.name})"
            )

    def _bias_name(self, layer: Layer, part: str, number: int) -> str:
        stored = layer.family.parts[part]
        suffix = "_bias" if stored.fused else ".bias"
        return layer.prefix + stored.stem.format(e=number) + suffix

    def _names_of(self, layer: Layer, part: str, number: int) -> Iterator[tuple[str, str]]:
        """Yield the tensors of a matrix that are there."""
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, number, role)
            if not piece.optional or name in self.index:
                yield role, name

    # --- finding --------------------------------------------------------------------------------

    def _find(self, number: int) -> Layer:
        named = [
            layer
            for layer in self._candidates(number)
            if layer.name(_first(layer.family), 0) in self.index
        ]
        if not named:
            raise CheckpointError(self._no_experts(number))
        # A row made for this model is the only one: another might fit by accident of sizes.
        own = [layer for layer in named if layer.family.model_types]
        candidates = own or named
        typed = [layer for layer in candidates if self._has_types(layer)]
        if not typed:
            raise CheckpointError(self._no_scheme(candidates))
        grouped = [replace(layer, group=self._group(layer)) for layer in typed]
        return next((layer for layer in grouped if self._fits(layer)), grouped[0])

    def _candidates(self, number: int) -> Iterator[Layer]:
        for prefix in PREFIXES:
            for family in FAMILIES:
                if family.model_types and self.config.model_type not in family.model_types:
                    continue
                for scheme in SCHEMES:
                    if all(_suits(scheme, family.parts[part]) for part in _weights(family)):
                        yield Layer(number, prefix.format(L=number), family, scheme)

    @cached_property
    def _names(self) -> re.Pattern[str]:
        """Match the first tensor of an expert, in any layer and scheme."""
        names = {
            prefix + name
            for prefix in PREFIXES
            for family in FAMILIES
            for scheme in SCHEMES
            for stored in [family.parts[_first(family)]]
            for name in [scheme.name_of("data", stored.stem, stored.fused)]
            if name is not None
        }
        return _pattern(sorted(names))

    def _has_types(self, layer: Layer) -> bool:
        """Whether the first matrix has all tensors of the scheme, with elements of its types."""
        part = _first(layer.family)
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, 0, role)
            if name not in self.index:
                if not piece.optional:
                    return False
            elif self.index.dtype(name) not in piece.dtypes:
                return False
        return True

    def _fits(self, layer: Layer) -> bool:
        return all(
            name in self.index and self.index.shape(name) in self._shapes(layer, part, role)
            for part in layer.family.parts
            for role in (layer.scheme.tensors if not part.endswith("_bias") else ("data",))
            for name in [layer.name(part, 0, role)]
            if name in self.index or not self._optional(layer, part, role)
        )

    def _optional(self, layer: Layer, part: str, role: str) -> bool:
        return not part.endswith("_bias") and layer.scheme.tensors[role].optional

    def _group(self, layer: Layer) -> int:
        """Columns of a group: as config.json says, or else as the first scales have it."""
        said = self.config.quantization.group_size
        if said is not None:
            return said
        scale = layer.scheme.tensors.get("scale")
        if scale is None or "K/G" not in scale.shape:
            return 0
        part = _first(layer.family)
        _, k = self._extents(layer, part)
        shape = self.index.shape(layer.name(part, 0, "scale"))
        groups = shape[-len(scale.shape.split()) :][scale.shape.split().index("K/G")]
        return 0 if groups == 1 else -(-k // groups)

    # --- checking -------------------------------------------------------------------------------

    def _check(self, layer: Layer, part: str, expert: int) -> None:
        """Compare the tensors of one part with what config.json and the tables mean."""
        if part.endswith("_bias"):
            self._check_tensor(layer, part, "data", layer.name(part, expert), PLAIN.tensors["data"])
            return
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, expert, role)
            if name in self.index:
                self._check_tensor(layer, part, role, name, piece)
            elif not piece.optional:
                data = layer.name(part, expert)
                if role != "data" and data in self.index:
                    raise CheckpointError(f"{self._where(data)} needs {name}, which is missing")
                self.index.file(name)

    def _check_tensor(self, layer: Layer, part: str, role: str, name: str, piece: Part) -> None:
        shape, expected = self.index.shape(name), self._shapes(layer, part, role)
        if shape not in expected:
            stored = layer.family.parts[part]
            axes = stored.axes if layer.scheme is PLAIN or part.endswith("_bias") else piece.shape
            raise CheckpointError(
                f"{self._where(name)} has shape {list(shape)}, but config.json means "
                f"{' or '.join(str(list(one)) for one in expected)} ({axes})"
            )
        if self.index.dtype(name) not in piece.dtypes:
            raise CheckpointError(
                f"{self._where(name)} has elements of type {self.index.dtype(name)}, expected "
                f"{' or '.join(piece.dtypes)}"
            )

    def _check_count(self, layer: Layer) -> None:
        """Refuse more experts than config.json says; too few were noticed by `_check`."""
        for part, stored in layer.family.parts.items():
            surplus = layer.name(part, self.config.num_experts)
            if not stored.fused and surplus in self.index:
                raise CheckpointError(
                    f"{self.folder} has the tensor {surplus}, but config.json says that there are "
                    f"{self.config.num_experts} experts"
                )

    def _check_surplus(self, layer: Layer) -> None:
        """Refuse tensors of experts that are not read."""
        names = self._expert_names.get(layer.prefix, [])
        found = surplus(names, set(self._names_read(layer)))
        if found:
            raise CheckpointError(
                f"{self._where(found[0])} is none that ktk reads with experts that are named and "
                f"stored so ({layer.family.name}, {layer.scheme.name}); there are {len(found)} such"
                f" tensors in layer {layer.number}"
            )

    @cached_property
    def _expert_names(self) -> dict[str, list[str]]:
        return by_layer(self.index.names())

    def _names_read(self, layer: Layer) -> Iterator[str]:
        """Yield the names of the tensors of a layer, and of those that may be beside them."""
        for part, stored in layer.family.parts.items():
            for expert in range(1 if stored.fused else self.config.num_experts):
                if part.endswith("_bias"):
                    yield layer.name(part, expert)
                    continue
                yield self._bias_name(layer, part, expert)
                for role in layer.scheme.tensors:
                    yield layer.name(part, expert, role)

    def _shapes(self, layer: Layer, part: str, role: str) -> list[tuple[int, ...]]:
        """Return what the shape of a tensor may be."""
        stored = layer.family.parts[part]
        if layer.scheme is PLAIN or part.endswith("_bias"):
            return [tuple(self._size(axis) for axis in stored.axes.split())]
        shapes = self._layout(layer, part).shapes(layer.scheme.tensors[role])
        experts = (self.config.num_experts,) if stored.fused else ()
        return [(*experts, *shape) for shape in shapes]

    def _layout(self, layer: Layer, part: str) -> Layout:
        return Layout(*self._extents(layer, part), layer.group, self.config.quantization)

    def _extents(self, layer: Layer, part: str) -> tuple[int, int]:
        """Rows and columns of a part as it is multiplied, whatever the order of its axes."""
        depth = "I" if part == "down" else "H"
        [rows] = set(layer.family.parts[part].axes.split()) - {"E", depth}
        return self._size(rows), self._size(depth)

    def _size(self, axis: str) -> int:
        config = self.config
        sizes = {
            "E": config.num_experts,
            "H": config.hidden_size,
            "I": config.intermediate_size,
            "2I": 2 * config.intermediate_size,
            "I2": 2 * config.intermediate_size,
        }
        return sizes[axis]

    def _where(self, name: str) -> str:
        return f"tensor {name} in {self.index.file(name)}"

    def _no_scheme(self, candidates: list[Layer]) -> str:
        """Say what is beside a tensor that no row of the table explains."""
        layer = candidates[0]
        first = layer.name(_first(layer.family), 0)
        stem = layer.prefix + layer.family.parts[_first(layer.family)].stem.format(e=0)
        beside = [
            f"{name} ({self.index.dtype(name)})"
            for name in sorted(self.index.names())
            if name.startswith(stem) and name != first
        ]
        method = self.config.quantization.method
        return (
            f"{self._where(first)} has elements of type {self.index.dtype(first)}, and ktk knows "
            f"no scheme that it is part of; beside it: {', '.join(beside) or 'nothing'}"
            + (f"; config.json says {method}" if method else "")
        )

    def _no_experts(self, number: int) -> str:
        message = f"{self.folder} has no experts that ktk knows by name in layer {number}"
        near = sorted(
            re.sub(r"experts\.\d+", "experts.*", name)
            for name in self.index.names()
            if re.search(rf"(^|\.)layers\.{number}\..*experts", name)
        )
        if near:
            return f"{message}; it has {', '.join(dict.fromkeys(near))}"
        layers = self.layers()
        return f"{message}; layers with experts: {spans(layers) or 'none'}"


def spans(numbers: list[int]) -> str:
    """Write ascending numbers shortly: 3-60, 62."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)


def _first(family: Family) -> str:
    return next(iter(family.parts))


def _weights(family: Family) -> list[str]:
    return [part for part in family.parts if not part.endswith("_bias")]


def _suits(scheme: Scheme, stored: Stored) -> bool:
    """Whether the scheme has names for tensors of this kind: shared by experts, or their own."""
    return not stored.fused or all(part.fused is not None for part in scheme.tensors.values())


def _pattern(names: list[str]) -> re.Pattern[str]:
    """Match any of the names, with the layer in one of the groups."""
    choices = []
    for name in names:
        escaped = re.escape(name).replace(r"\{L\}", r"(\d+)").replace(r"\{e\}", r"\d+")
        choices.append(escaped)
    return re.compile("|".join(choices))


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)
