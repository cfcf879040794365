"""Finds a layer's experts by the table of families, and reads them one at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.checkpoint.families import FAMILIES, PREFIXES, Family, Stored
from ktk.checkpoint.index import TensorIndex
from ktk.errors import CheckpointError

# Elements that hold a value without a scale.
_PLAIN = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Layer:
    """The experts of one layer: which names they have."""

    number: int
    prefix: str
    family: Family

    def name(self, part: str, expert: int) -> str:
        """Return the full name of a part of an expert."""
        return self.prefix + self.family.parts[part].name.format(e=expert)


class Checkpoint:
    """A folder with config.json and safetensors files, seen as layers of experts."""

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.config: ExpertConfig = read_config(self.folder)
        self.index = TensorIndex(self.folder)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.index.close()

    def layers(self) -> list[int]:
        """Return the layers that have experts of a family ktk knows."""
        names = [prefix + _first(family).name for prefix in PREFIXES for family in FAMILIES]
        pattern = _pattern(names)
        found = (pattern.fullmatch(name) for name in self.index.names())
        return sorted({int(_group(match)) for match in found if match})

    def config_of(self, layer: Layer) -> ExpertConfig:
        """Return sizes and activation function of a layer: the same for all."""
        return self.config

    def layer(self, number: int) -> Layer:
        """Find out how the experts of a layer are stored, and check that all of them are there."""
        found = self._find(number)
        for part, stored in found.family.parts.items():
            for expert in range(1 if stored.fused else self.config.num_experts):
                self._check(found.name(part, expert), stored)
        self._check_count(found)
        return found

    def expert(self, layer: Layer, number: int) -> dict[str, torch.Tensor]:
        """Read one expert.

        Returns
        -------
        dict[str, Tensor]
            gate and up [I, H], down [H, I], and gate_bias, up_bias [I], down_bias [H] where the
            model has them: the arguments of `MoE.load_expert`. Views of the mapped file where the
            layout allows, contiguous in any case.
        """
        tensors: dict[str, torch.Tensor] = {}
        for part, stored in layer.family.parts.items():
            axes = stored.axes.split()
            tensor = self.index.tensor(layer.name(part, number), number if stored.fused else None)
            tensors.update(_split(part, tensor, axes[1:] if stored.fused else axes))
        return tensors

    def _find(self, number: int) -> Layer:
        named = [
            Layer(number, start, family)
            for prefix in PREFIXES
            for start in [prefix.format(L=number)]
            for family in FAMILIES
            if not family.model_types or self.config.model_type in family.model_types
            if start + _first(family).name.format(e=0) in self.index
        ]
        if not named:
            raise CheckpointError(self._no_experts(number))
        # A row made for this model is the only one: another might fit by accident of sizes.
        own = [layer for layer in named if layer.family.model_types]
        candidates = own or named
        return next((layer for layer in candidates if self._fits(layer)), candidates[0])

    def _fits(self, layer: Layer) -> bool:
        return all(
            layer.name(part, 0) in self.index
            and self.index.shape(layer.name(part, 0)) == self._expected(stored)
            for part, stored in layer.family.parts.items()
        )

    def _check(self, name: str, stored: Stored) -> None:
        shape, expected = self.index.shape(name), self._expected(stored)
        where = f"tensor {name} in {self.index.file(name)}"
        if shape != expected:
            raise CheckpointError(
                f"{where} has shape {list(shape)}, but config.json means {list(expected)} "
                f"({stored.axes})"
            )
        if self.index.dtype(name) not in _PLAIN:
            raise CheckpointError(
                f"{where} has elements of type {self.index.dtype(name)}; only "
                f"{', '.join(_PLAIN)} are read from checkpoints"
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

    def _expected(self, stored: Stored) -> tuple[int, ...]:
        config = self.config
        sizes = {
            "E": config.num_experts,
            "H": config.hidden_size,
            "I": config.intermediate_size,
            "2I": 2 * config.intermediate_size,
            "I2": 2 * config.intermediate_size,
        }
        return tuple(sizes[axis] for axis in stored.axes.split())

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


def _split(part: str, tensor: torch.Tensor, axes: list[str]) -> dict[str, torch.Tensor]:
    """Turn one stored part into the arguments it stands for."""
    suffix = "_bias" if part.endswith("_bias") else ""
    if not part.startswith("gate_up"):
        return {part: _oriented(part, tensor, axes)}
    both = next(axis for axis in axes if axis in ("2I", "I2"))
    dim = axes.index(both)
    if both == "2I":
        gate, up = tensor.chunk(2, dim)
    else:
        rows = tensor.movedim(dim, 0)
        gate, up = rows[0::2].movedim(0, dim), rows[1::2].movedim(0, dim)
    single = ["I" if axis == both else axis for axis in axes]
    return {
        "gate" + suffix: _oriented("gate", gate, single),
        "up" + suffix: _oriented("up", up, single),
    }


def _oriented(part: str, tensor: torch.Tensor, axes: list[str]) -> torch.Tensor:
    """Put output columns first, depth second."""
    wanted = ["H", "I"] if part == "down" else ["I", "H"]
    if len(axes) == 2 and axes != wanted:
        tensor = tensor.T
    return tensor.contiguous()


def _first(family: Family) -> Stored:
    return next(iter(family.parts.values()))


def _pattern(names: list[str]) -> re.Pattern[str]:
    """Match any of the names, with the layer in one of the groups."""
    choices = []
    for name in names:
        escaped = re.escape(name).replace(r"\{L\}", r"(\d+)").replace(r"\{e\}", r"\d+")
        choices.append(escaped)
    return re.compile("|".join(choices))


def _group(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)
