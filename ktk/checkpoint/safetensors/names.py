"""What is known of one layer of experts: names and shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from ktk.checkpoint.config import ExpertConfig
from ktk.checkpoint.safetensors.families import Family
from ktk.checkpoint.safetensors.locations import Location
from ktk.checkpoint.safetensors.scheme import Layout, Scheme
from ktk.checkpoint.safetensors.storage import PLAIN

_EXPERT = "\0"  # which no name has


@dataclass(frozen=True)
class LayerNames:
    """Which names the tensors of a layer have, and how its matrices are stored.

    Where the scheme leaves them open, `group` is the number of columns that share a scale, 0 for
    all, and `bits` those of a code.
    """

    number: int
    location: Location
    family: Family
    scheme: Scheme
    config: ExpertConfig
    group: int = 0
    bits: int = 4

    @property
    def prefix(self) -> str:
        """What all names begin with: the layer, and the module that has the experts."""
        return self.location.prefix

    @property
    def first(self) -> str:
        """The part that layers are recognised by."""
        return first_part(self.family)

    @property
    def first_name(self) -> str:
        """The full name of that part's tensor, of expert 0."""
        return self.name(self.first, 0)

    def name(self, part: str, expert: int, role: str = "data") -> str:
        """Return the full name of a tensor of a part of an expert."""
        # Names of a thousand tensors are asked for five times each on their way into a layer.
        known = self._names.get((part, role))
        if known is None:
            known = self._names[part, role] = self._name_of(part, role)
        return known.replace(_EXPERT, str(expert))

    def stem(self, part: str, expert: int | str) -> str:
        """Return what the names of the tensors of a matrix begin with."""
        return self.prefix + self.family.parts[part].stem.format(e=expert)

    def bias_name(self, part: str, expert: int) -> str:
        """Return the name that a bias of a matrix has, or would have."""
        return self.name(f"{part}_bias", expert)

    @cached_property
    def _names(self) -> dict[tuple[str, str], str]:
        """Names by part and role, with `_EXPERT` for the number of the expert."""
        return {}

    def _name_of(self, part: str, role: str) -> str:
        if is_bias(part):  # a part of the family or not, as the matrix is
            matrix = part.removesuffix("_bias")
            bias = self.family.parts[matrix].bias(depth_of(matrix))
            return self.prefix + bias.name.format(e=_EXPERT)
        fused = self.family.parts[part].fused
        name = self.scheme.name_of(role, self.stem(part, _EXPERT), fused)
        assert name is not None, "a scheme without shared tensors was not chosen for a fused family"
        return name

    def tensors(self) -> Iterator[tuple[str, int]]:
        """Yield parts and experts; a tensor that experts share belongs to expert 0."""
        for part, stored in self.family.parts.items():
            for expert in range(1 if stored.fused else self.config.num_experts):
                yield part, expert

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors, and of those that may be beside them."""
        for part, expert in self.tensors():
            if is_bias(part):
                yield self.name(part, expert)
                continue
            yield self.bias_name(part, expert)
            for role in self.scheme.tensors:
                yield self.name(part, expert, role)

    def idle_names(self) -> Iterator[str]:
        """Yield the names of tensors that transformers writes for zero experts, and nobody reads.

        Its module of LongCat-Flash has rows of gate and up for all ids; there is no down of these.
        """
        for part, stored in self.family.parts.items():
            if part == "down" or is_bias(part) or stored.fused:
                continue
            for expert in range(self.config.num_experts, self.config.num_ids):
                yield self.name(part, expert)

    def shapes(self, part: str, role: str = "data") -> list[tuple[int, ...]]:
        """Return what the shape of a tensor may be."""
        # Checks ask for each of a thousand tensors, of which a handful differ.
        if (part, role) not in self._shapes:
            self._shapes[part, role] = self._shapes_of(part, role)
        return self._shapes[part, role]

    @cached_property
    def _shapes(self) -> dict[tuple[str, str], list[tuple[int, ...]]]:
        return {}

    def _shapes_of(self, part: str, role: str) -> list[tuple[int, ...]]:
        stored = self.family.parts[part]
        if self.scheme is PLAIN or is_bias(part):
            return [tuple(self._size(axis) for axis in stored.axes.split())]
        piece = self.scheme.tensors[role]
        shapes = self.layout(part).shapes(piece)
        if not stored.fused:
            return shapes
        each = [(self.config.num_experts, *shape) for shape in shapes]
        return each + shapes if piece.shared else each

    def layout(self, part: str) -> Layout:
        """Return the sizes of a matrix, as schemes want them."""
        return Layout(*self.extents(part), self.group, self.config.quantization, self.bits)

    def extents(self, part: str) -> tuple[int, int]:
        """Return rows and columns of a part as it is multiplied, whatever the order of its axes."""
        depth = depth_of(part)
        [rows] = set(self.family.parts[part].own) - {depth}
        return self._size(rows), self._size(depth)

    def _size(self, axis: str) -> int:
        config = self.config
        sizes = {
            "E": config.num_experts,
            "EI": config.num_experts * config.intermediate_size,
            "H": config.hidden_size,
            "I": config.intermediate_size,
            "2I": 2 * config.intermediate_size,
            "I2": 2 * config.intermediate_size,
        }
        return sizes[axis]


def first_part(family: Family) -> str:
    """Return the part that layers of a family are recognised by."""
    return next(iter(family.parts))


def depth_of(part: str) -> str:
    """Return the axis that the products of a part run along."""
    return "I" if part == "down" else "H"


def is_bias(part: str) -> bool:
    """Whether a part is a bias and no matrix."""
    return part.endswith("_bias")


def weight_parts(family: Family) -> list[str]:
    """Return the parts that are matrices."""
    return [part for part in family.parts if not is_bias(part)]
