"""Which tensors a checkpoint becomes, and in which file each is.

Tensors of experts become those of the format, one matrix of one expert each, in the place of the
first of them; all others are copied, in the order of the files. What belongs together, such as the
three matrices of an expert, is never divided.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ktk.checkpoint.pieces import flat
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.layer import SafetensorsLayer
from ktk.checkpoint.safetensors.names import LayerNames, is_bias, weight_parts
from ktk.checkpoint.safetensors.tensor_file import dtype_name
from ktk.conversion.compressed.formats import Target, TensorSpec
from ktk.conversion.compressed.shard import CHUNK, Shard
from ktk.errors import CheckpointError

# Where all experts share tensors, hosts look for those of each under these names.
_MODULES = {
    "fused": "mlp.experts",
    "fused-transposed": "mlp.experts",
    "llama4": "feed_forward.experts",
    "nemotron-fused": "mixer.experts",
}
_FLOATS = tuple(map(dtype_name, (torch.float64, torch.float32, torch.bfloat16, torch.float16)))
_CODES = re.compile(r".*\.(?:weight|weight_packed|qweight|W_q|_weight_qdata)")


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
    """

    shards: tuple[tuple[Shard, tuple[Unit, ...]], ...]
    kept: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for shard, _ in self.shards for spec in shard.specs)


def plan(
    checkpoint: SafetensorsCheckpoint, output: Path, target: Target, shard_nbytes: int
) -> Plan:
    """Plan the files of a checkpoint; `shard_nbytes` is what one may hold, if not a unit is larger.

    Raises
    ------
    CheckpointError
        There are no experts, some that compressed-tensors has no names for, or other weights that
        are stored in codes.
    """
    index = checkpoint.index
    layers = [checkpoint.layer(number) for number in checkpoint.layers()]
    owners: dict[str, SafetensorsLayer] = {}
    for layer in layers:
        _check_names(layer, index)
        owners |= dict.fromkeys(layer.names.names(), layer)
    is_beside = _beside(layers)
    units: list[Unit] = []
    begun: set[int] = set()
    for name in index.in_order():
        owner = owners.get(name)
        if owner is None and not is_beside(name):
            _check_floats(index, name)
            units.append(Copied(index, name))
        elif owner is not None and owner.number not in begun:
            begun.add(owner.number)
            units += _experts(owner, target)
    kept = _modules(one for one in units if isinstance(one, Copied))
    made = _modules(one for one in units if isinstance(one, QuantizedExpert))
    return Plan(tuple(_divided(units, output, shard_nbytes)), tuple(sorted(kept - made)))


def _modules(units: Iterable[Unit]) -> set[str]:
    """Return the modules of experts that tensors are in."""
    names = (spec.name for unit in units for spec in unit.specs)
    return {inside[1] for name in names if (inside := re.match(r"(.*\.experts)\.", name))}


def output_names(names: LayerNames, expert: int) -> dict[str, str]:
    """Return what the matrices of an expert are called: as they are, or as hosts divide them."""
    if module := _MODULES.get(names.family.name):
        stem = f"{names.prefix}{module}.{expert}"
        return {part: f"{stem}.{part}_proj" for part in names.config.parts}
    return {part: names.stem(part, expert) for part in weight_parts(names.family)}


def _experts(layer: SafetensorsLayer, target: Target) -> Iterator[Unit]:
    return (QuantizedExpert(layer, e, target) for e in range(layer.config.num_experts))


def _check_names(layer: SafetensorsLayer, index: TensorIndex) -> None:
    family = layer.names.family
    fused = any(stored.fused for stored in family.parts.values())
    if any(map(is_bias, family.parts)) or (fused and family.name not in _MODULES):
        raise CheckpointError(
            f"{index.where(layer.names.first_name)}: experts that are stored so ({family.name}) "
            "have no names in compressed-tensors that hosts read; ktk convert --backend packs them "
            "for ktk"
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
    if _CODES.fullmatch(name) and index.dtype(name) not in _FLOATS:
        raise CheckpointError(
            f"{index.where(name)} is no expert and of type {index.dtype(name)}, and a checkpoint "
            "whose other layers are stored in codes cannot be converted: give one that has them as "
            "bf16, f16 or f32"
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
