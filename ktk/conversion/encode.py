"""Brings the experts of any checkpoint into what a backend stores."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ktk import _core
from ktk._core import Format
from ktk.backend import Backend
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.packed.layout import Layout
from ktk.checkpoint.reader import CheckpointReader
from ktk.errors import CheckpointError
from ktk.expert import Expert, Matrix
from ktk.loading.plan import naming_layer
from ktk.loading.route import Choose, Route, checked, chooser, route_of, takes
from ktk.quantize import from_bytes


@dataclass(frozen=True)
class Encoder:
    """Reads the experts of one layer, and makes what its file will hold.

    Attributes
    ----------
    number
        Number of the layer.
    layout
        What the file will hold.
    route
        How the experts get there.
    """

    number: int
    layout: Layout
    route: Route

    @property
    def backend(self) -> Backend:
        """What the file is for."""
        return self.route.backend

    @property
    def how(self) -> str:
        """What happens to the weights, for people: "stored as they are", "rounded" ..."""
        return self.route.how

    def expert(self, number: int) -> Expert:
        """Return one expert in the formats of `layout`.

        Raises
        ------
        CheckpointError
            A weight is not finite, where that cannot be stored.
        """
        matrices = self.route.read(number).matrices
        with naming_layer(self.number):
            for part, matrix in matrices.items():
                try:
                    made = self._encode(part, number, matrix)
                except ValueError as error:
                    raise CheckpointError(f"{part} of expert {number}: {error}") from error
                bias = None if matrix.bias is None else matrix.bias.to(torch.float32)
                matrices[part] = replace(made, bias=bias)
        return Expert(**matrices)

    def _encode(self, part: str, number: int, given: Matrix) -> Matrix:
        here, stored = self.route.given[part], self.route.stored[part]
        if here.format.same_as(stored, here.n, here.k):
            return given
        if _exports(self.backend) and takes(self.backend, here, stored):
            packed = _core.PackedMatrix(
                self.backend.core,
                "",
                given.data,
                given.scale,
                given.zero,
                given=here.format,
                stored=stored,
            )
            return from_bytes(stored, *packed.exported())
        return self.route.quantized(part, number, given)


def plan_layer(
    checkpoint: CheckpointReader,
    number: int,
    backend: Backend,
    group_size: int | None,
    named: Format | None = None,
) -> Encoder:
    """Find out what a backend makes of a layer; reads one expert.

    Raises
    ------
    CheckpointError
        The layer is incomplete or damaged.
    CheckpointFormatError
        There is no way from what is stored to what the backend stores, or none with such groups.
    """
    layer = checkpoint.layer(number)
    likes = chooser(backend, None, named) if group_size is None else _of_groups(backend, group_size)

    def choose(part: str, given: MatrixInfo, decoded: bool) -> Format:
        # Rows of a file are whole bytes.
        return checked(likes(part, given, decoded), given)

    with naming_layer(number):
        route = route_of(layer, backend, choose)
    if not _exports(backend):
        route = replace(route, quantizer="ktk.quantize")
    first = route.read(0).matrices
    biases = tuple(part for part, matrix in first.items() if matrix.bias is not None)
    factors = tuple(
        part
        for part, matrix in first.items()
        if route.stored[part].scale == "none" and matrix.scale is not None
    )
    return Encoder(number, Layout(layer.config, route.stored, biases, factors), route)


def _of_groups(backend: Backend, group_size: int) -> Choose:
    """Return what chooses the first format with groups of a size."""

    def choose(part: str, given: MatrixInfo, decoded: bool) -> Format:
        fitting = [
            fmt
            for fmt in backend.formats
            if fmt.scale != "none"
            and fmt.group_n == 1
            and (fmt.group_k or given.k) == (group_size or given.k)
        ]
        if not fitting:
            sizes = {fmt.group_k for fmt in backend.formats if fmt.scale != "none"}
            offered = ", ".join(str(size) if size else "0 (rows)" for size in sorted(sizes))
            raise ValueError(
                f"{backend.name} has no groups of {group_size}, but {offered or 'none'}"
            )
        taken = (fmt for fmt in fitting if takes(backend, given, fmt))
        chosen = next(taken, fitting[0] if decoded else None)
        if chosen is None:
            raise ValueError(f"{backend.name} makes no groups of {group_size} of {given.format}")
        return chosen

    return choose


def _exports(backend: Backend) -> bool:
    """Whether what the backend packed can be had again, by the variant that would run here."""
    chosen = backend.core.default_variant()
    return any(variant.exports for variant in backend.variants if variant.name == chosen)
