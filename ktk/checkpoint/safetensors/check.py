"""Compares the tensors of a layer with config.json and with what the tables say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.locations import Locations
from ktk.checkpoint.safetensors.names import LayerNames, is_bias
from ktk.checkpoint.safetensors.scheme import Part, fits
from ktk.checkpoint.safetensors.storage import PLAIN
from ktk.checkpoint.safetensors.surplus import surplus
from ktk.errors import CheckpointError


class Checker:
    """Refuses layers that lack a tensor, or have one that is not what it should be."""

    def __init__(self, index: TensorIndex, locations: Callable[[], Locations]) -> None:
        self.index = index
        self._locations = locations

    def check(self, layer: LayerNames) -> None:
        """Check all tensors of a layer.

        Raises
        ------
        CheckpointError
            The message names the first one that is missing, wrong or not expected.
        """
        for error in self.faults(layer):
            raise error

    def faults(self, layer: LayerNames) -> Iterator[CheckpointError]:
        """Yield all that `check` could raise."""
        yield from _caught(self._check_files, layer)
        for part, expert in layer.tensors():
            yield from _caught(self._check_part, layer, part, expert)
        yield from _caught(self._check_count, layer)
        yield from _caught(self._check_surplus, layer)

    def _check_files(self, layer: LayerNames) -> None:
        """Refuse files with tensors that nobody lists: what follows looks at those listed only."""
        self.index.look_beside(self._locations().names(layer.location))

    def _check_part(self, layer: LayerNames, part: str, expert: int) -> None:
        """Compare the tensors of one part with what config.json and the tables mean."""
        if is_bias(part):
            self._check_tensor(layer, part, "data", layer.name(part, expert), PLAIN.tensors["data"])
            return
        for role, piece in layer.scheme.tensors.items():
            name = layer.name(part, expert, role)
            if name in self.index:
                self._check_tensor(layer, part, role, name, piece)
            elif not piece.optional:
                data = layer.name(part, expert)
                if role != "data" and data in self.index:
                    raise CheckpointError(
                        f"{self.index.where(data)} needs {name}, which is missing"
                    )
                self.index.file(name)

    def _check_tensor(
        self, layer: LayerNames, part: str, role: str, name: str, piece: Part
    ) -> None:
        shape, expected = self.index.shape(name), layer.shapes(part, role)
        if not fits(shape, expected):
            stored = layer.family.parts[part]
            axes = stored.axes if layer.scheme is PLAIN or is_bias(part) else piece.shape
            raise CheckpointError(
                f"{self.index.where(name)} has shape {list(shape)}, but config.json means "
                f"{' or '.join(str(list(one)) for one in expected)} ({axes})"
            )
        if self.index.dtype(name) not in piece.dtypes:
            raise CheckpointError(
                f"{self.index.where(name)} has elements of type {self.index.dtype(name)}, expected "
                f"{' or '.join(piece.dtypes)}"
            )

    def _check_count(self, layer: LayerNames) -> None:
        """Refuse more experts than config.json says; too few were noticed by `_check`."""
        idle = set(layer.idle_names())
        for part, stored in layer.family.parts.items():
            known = layer.config.num_experts
            if layer.name(part, known) in idle:
                known = layer.config.num_ids
            surplus = layer.name(part, known)
            if not stored.fused and surplus in self.index:
                raise CheckpointError(
                    f"{self.index.folder} has the tensor {surplus}, but config.json says that "
                    f"there are {layer.config.num_experts} experts"
                )

    def _check_surplus(self, layer: LayerNames) -> None:
        """Refuse tensors of experts that are not read."""
        names = self._locations().names(layer.location)
        found = surplus(names, layer.prefix, {*layer.names(), *layer.idle_names()})
        if found:
            raise CheckpointError(
                f"{self.index.where(found[0])} is none that ktk reads with experts that are named "
                f"and stored so ({layer.family.name}, {layer.scheme.name}); there are "
                f"{len(found)} such tensors in layer {layer.number}"
            )


def _caught(check: Callable[..., None], *arguments: Any) -> Iterator[CheckpointError]:
    try:
        check(*arguments)
    except CheckpointError as error:
        yield error
