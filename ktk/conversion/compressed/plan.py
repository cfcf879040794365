"""Which tensors a checkpoint becomes, and in which file each is.

Tensors of experts become those of the format, one matrix of one expert each, in the place of the
first of them. All others are copied, in the order of the files; a matrix that is stored in codes is
decoded, because one `quantization_config` has to do for all. What belongs together, such as the
three matrices of an expert, is never divided.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ktk.checkpoint.pieces import flat
from ktk.checkpoint.reader import decoded
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.layer import SafetensorsLayer
from ktk.checkpoint.safetensors.names import LayerNames, is_bias, weight_parts
from ktk.checkpoint.safetensors.single import StoredMatrix, find_matrix
from ktk.checkpoint.safetensors.storage import PLAIN, SCHEMES
from ktk.checkpoint.safetensors.surplus import OF_ACTIVATIONS
from ktk.checkpoint.safetensors.tensor_file import dtype_name
from ktk.conversion.compressed.formats import Target, TensorSpec
from ktk.conversion.compressed.shard import CHUNK, Shard
from ktk.errors import CheckpointError

# Where all experts share tensors, of these families and in these modules, hosts look for those of
# each under names of their own.
_DIVIDED = ("fused", "fused-transposed", "stacked")
_MODULES = (".mlp.", ".feed_forward.", ".mixer.")
_FLOATS = tuple(map(dtype_name, (torch.float64, torch.float32, torch.bfloat16, torch.float16)))
_CODES = re.compile(r".*\.(?:weight|weight_packed|qweight|W_q|_weight_qdata)")
# What may follow the name of a matrix in codes: what is added to products, and stays; and scales of
# activations and KV caches, which do nothing to a matrix of floats.
_ADDED = (".bias", ".e_score_correction_bias")
_OF_CACHES = r"[._](?:[qkv]|kv|prob|output)_(?:global_)?(?:scale|zero_point)"
_HARMLESS = re.compile(f"{OF_ACTIVATIONS}|{_OF_CACHES}")
# Of schemes whose codes may be in elements that are called floats: what follows a matrix's name in
# that of its codes, and in those of the tensors beside them.
_AS_FLOATS = tuple(
    (
        scheme.tensors["data"].suffix,
        tuple(
            part.suffix
            for role, part in scheme.tensors.items()
            if role != "data" and not part.optional
        ),
    )
    for scheme in SCHEMES
    if scheme is not PLAIN and set(scheme.tensors["data"].dtypes) & set(_FLOATS)
)


class Unit(ABC):
    """Tensors that are written together.

    Attributes
    ----------
    specs
        What they are.
    """

    specs: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to be written."""
        return sum(spec.nbytes for spec in self.specs)

    @abstractmethod
    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        """Yield the bytes of the tensors, each from its first to its last."""


class Copied(Unit):
    """A tensor that stays as it is."""

    def __init__(self, index: TensorIndex, name: str) -> None:
        self._index = index
        spec = TensorSpec(name, index.dtype(name), index.shape(name), index.nbytes(name))
        self.specs = (spec,)

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        [spec] = self.specs
        for begin in range(0, spec.nbytes, CHUNK):
            data = self._index.read_bytes(spec.name, begin, min(CHUNK, spec.nbytes - begin))
            yield spec.name, data.numpy().data


class Decoded(Unit):
    """A matrix that is stored in codes, as floats."""

    def __init__(self, matrix: StoredMatrix, dtype: torch.dtype) -> None:
        self._matrix, self._dtype = matrix, dtype
        nbytes = math.prod(matrix.shape) * dtype.itemsize
        spec = TensorSpec(f"{matrix.stem}.weight", dtype_name(dtype), matrix.shape, nbytes)
        self.specs = (spec,)

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        [spec] = self.specs
        found = decoded(self._matrix.read(), spec.name)
        yield spec.name, flat(found.data.to(self._dtype)).data


class QuantizedExpert(Unit):
    """The matrices of an expert in a format."""

    def __init__(self, layer: SafetensorsLayer, expert: int, target: Target) -> None:
        self._layer, self._expert, self._target = layer, expert, target
        self._names = output_names(layer.names, expert)
        self.specs = tuple(
            spec
            for part, matrix in layer.formats.items()
            for spec in target.specs(self._names[part], matrix.n, matrix.k)
        )

    def pieces(self) -> Iterator[tuple[str, memoryview]]:
        layer, names = self._layer, self._names
        matrices = layer.expert(self._expert, decode=list(names)).matrices
        for part in names:
            # Each for itself, so that the message names the one that is wrong.
            if not matrices[part].data.isfinite().all():
                raise CheckpointError(
                    f"{layer.where(part, self._expert)} holds values that are not finite, which "
                    "cannot be quantised: ktk verify names all of them"
                )
        made = self._target.quantized({part: matrices[part].data for part in names})
        for part, tensors in made.items():
            for role, tensor in tensors.items():
                yield f"{names[part]}.{role}", flat(tensor).data


@dataclass(frozen=True)
class Plan:
    """What is to be written.

    Attributes
    ----------
    shards
        The files, with what goes into each.
    kept
        Modules of experts that stay as they are.
    decoded
        How many other matrices are decoded.
    """

    shards: tuple[tuple[Shard, tuple[Unit, ...]], ...]
    kept: tuple[str, ...]
    decoded: int


def plan(
    checkpoint: SafetensorsCheckpoint,
    output: Path,
    target: Target,
    dtype: torch.dtype,
    shard_nbytes: int,
) -> Plan:
    """Plan the files of a checkpoint.

    Parameters
    ----------
    checkpoint
        The source.
    output
        The folder of the files.
    target
        What experts become.
    dtype
        What other matrices become that are stored in codes.
    shard_nbytes
        What a file may hold; a larger tensor is alone in one.

    Raises
    ------
    CheckpointError
        There are no experts, some that compressed-tensors has no names for or that have biases,
        other weights in codes that ktk does not read, or something beside such codes that may
        change what they mean.
    """
    index = checkpoint.index
    layers = [checkpoint.layer(number) for number in checkpoint.layers()]
    owners: dict[str, SafetensorsLayer] = {}
    for layer in layers:
        _check_names(layer, index)
        owners |= dict.fromkeys(layer.names.names(), layer)
    is_beside = _beside(layers)
    others = [one for one in index.in_order() if one not in owners and not is_beside(one)]
    matrices = _in_codes(checkpoint, others)
    units: list[Unit] = []
    begun: set[object] = set()
    for name in index.in_order():
        unit: Iterable[Unit] = [Copied(index, name)]
        key: object = name
        if name in owners:
            key = owners[name].number
            unit = _experts(owners[name], target)
        elif is_beside(name):
            continue
        elif (matrix := _owner(index, name, matrices)) is not None:
            key, unit = matrix.stem, [Decoded(matrix, dtype)]
        else:
            _check_floats(index, name)
        if key not in begun:
            begun.add(key)
            units += unit
    kept = _modules(one for one in units if not isinstance(one, QuantizedExpert))
    made = _modules(one for one in units if isinstance(one, QuantizedExpert))
    shards = tuple(_divided(units, output, shard_nbytes))
    return Plan(shards, tuple(sorted(kept - made)), len(matrices))


def _in_codes(checkpoint: SafetensorsCheckpoint, names: Iterable[str]) -> dict[str, StoredMatrix]:
    """Return the matrices in codes among tensors, by what their names begin with."""
    suffixes = sorted({scheme.tensors["data"].suffix for scheme in SCHEMES})
    found = {}
    for name in names:
        if not _may_be_codes(checkpoint.index, name):
            continue
        for suffix in suffixes:
            stem = name.removesuffix(suffix)
            if stem != name and stem not in found:
                matrix = find_matrix(checkpoint.index, stem, checkpoint.config.quantization)
                if matrix is not None:
                    found[stem] = matrix
    return found


def _may_be_codes(index: TensorIndex, name: str) -> bool:
    """Whether a tensor is of no float type, or is beside others as only codes are."""
    if index.dtype(name) not in _FLOATS:
        return True
    return any(
        name.endswith(suffix) and name.removesuffix(suffix) + one in index
        for suffix, beside in _AS_FLOATS
        for one in beside
    )


def _owner(
    index: TensorIndex, name: str, matrices: Mapping[str, StoredMatrix]
) -> StoredMatrix | None:
    """Return the matrix in codes that a tensor belongs to; biases stay as they are.

    Raises
    ------
    CheckpointError
        The tensor is beside such a matrix, and its scheme has none of this name.
    """
    ends = (match.start() for match in re.finditer(r"\.", name))
    matrix = next((matrices[name[:end]] for end in ends if name[:end] in matrices), None)
    if matrix is None:
        return None
    rest = name.removeprefix(matrix.stem)
    if rest in _ADDED:
        return None
    known = any(rest == part.suffix for part in matrix.scheme.tensors.values())
    if not known and not _HARMLESS.fullmatch(rest):
        raise CheckpointError(
            f"{index.where(name)} is beside the matrix {matrix.stem}, which is stored as "
            f"{matrix.scheme.name}, and nobody knows what it does to that: give the checkpoint "
            "that this one was made from"
        )
    return matrix


def _modules(units: Iterable[Unit]) -> set[str]:
    """Return the modules of experts that tensors are in."""
    names = (spec.name for unit in units for spec in unit.specs)
    return {inside[1] for name in names if (inside := re.match(r"(.*\.experts)\.", name))}


def output_names(names: LayerNames, expert: int) -> dict[str, str]:
    """Return what the matrices of an expert are called: as they are, or as hosts divide them."""
    if names.family.name in _DIVIDED:
        stem = f"{names.prefix}experts.{expert}"
        return {part: f"{stem}.{part}_proj" for part in names.config.parts}
    return {part: names.stem(part, expert) for part in weight_parts(names.family)}


def _experts(layer: SafetensorsLayer, target: Target) -> Iterator[Unit]:
    return (QuantizedExpert(layer, e, target) for e in range(layer.config.num_experts))


def _check_names(layer: SafetensorsLayer, index: TensorIndex) -> None:
    family = layer.names.family
    fused = any(stored.fused for stored in family.parts.values())
    divided = family.name in _DIVIDED and layer.names.prefix.endswith(_MODULES)
    if fused and not divided:
        raise CheckpointError(
            f"{index.where(layer.names.first_name)}: experts that are stored so ({family.name}) "
            "have no names in compressed-tensors that hosts read; ktk convert --backend packs them "
            "for ktk"
        )
    for part in filter(is_bias, family.parts):
        raise CheckpointError(
            f"{index.where(layer.names.name(part, 0))} is a bias of experts, and hosts read none "
            "beside experts in compressed-tensors; ktk convert --backend packs it for ktk"
        )


def _beside(layers: Iterable[SafetensorsLayer]) -> Callable[[str], bool]:
    """Return whether a tensor belongs to a matrix without being read: what made activations."""
    own: set[str] = set()
    shared: list[str] = []
    for layer in layers:
        for part in weight_parts(layer.names.family):
            if layer.names.family.parts[part].fused:
                shared.append(layer.names.stem(part, 0))
            else:
                own |= {layer.names.stem(part, e) for e in range(layer.config.num_experts)}
    begins = tuple(shared)
    return lambda name: name.rpartition(".")[0] in own or name.startswith(begins)


def _check_floats(index: TensorIndex, name: str) -> None:
    if _CODES.fullmatch(name) and _may_be_codes(index, name):
        what = "holds codes in elements" if index.dtype(name) in _FLOATS else "is"
        raise CheckpointError(
            f"{index.where(name)} {what} of type {index.dtype(name)}, and ktk knows no scheme that "
            "it is part of: give a checkpoint that has all but experts as bf16, f16 or f32"
        )


def _divided(
    units: Iterable[Unit], output: Path, most: int
) -> Iterator[tuple[Shard, tuple[Unit, ...]]]:
    """Fill files with units, in their order."""
    files: list[list[Unit]] = [[]]
    filled = 0
    for unit in units:
        if files[-1] and filled + unit.nbytes > most:
            files.append([])
            filled = 0
        files[-1].append(unit)
        filled += unit.nbytes
    for number, inside in enumerate(files, 1):
        path = output / f"model-{number:05d}-of-{len(files):05d}.safetensors"
        yield Shard(path, (spec for unit in inside for spec in unit.specs)), tuple(inside)
