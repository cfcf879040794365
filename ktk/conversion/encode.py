"""Brings the experts of any checkpoint into what a backend stores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from ktk import _core
from ktk._core import Format
from ktk.backend import Backend
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.packed.codec import kept_layout, pack, packed_size
from ktk.checkpoint.packed.layout import Layout, PackedSpec, factor_name
from ktk.checkpoint.reader import CheckpointReader
from ktk.errors import CheckpointError
from ktk.expert import Expert, Matrix
from ktk.loading.plan import naming_layer
from ktk.loading.route import Choose, Route, checked, chooser, route_of, takes
from ktk.quantize import from_bytes

# Packed bytes of the parts of an expert.
Sizes = dict[str, int]


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
        """Return one expert in the formats of `layout`, or packed.

        Raises
        ------
        CheckpointError
            A weight is not finite, where that cannot be stored.
        """
        matrices = self.route.read(number).matrices
        with naming_layer(self.number):
            for part, matrix in matrices.items():
                try:
                    if part in self.layout.packed:
                        made = self._packed(part, number, matrix)
                    else:
                        made = self._encode(part, number, matrix)
                except ValueError as error:
                    raise CheckpointError(f"{part} of expert {number}: {error}") from error
                bias = None if matrix.bias is None else matrix.bias.to(torch.float32)
                matrices[part] = replace(made, bias=bias, order=self._order(part, matrix))
        return Expert(**matrices)

    def sized(self, run: Callable[[Callable[[int], Sizes], range], Iterable[Sizes]]) -> Encoder:
        """Look at all experts where packed bytes depend on them, and give the layout their sizes.

        Parameters
        ----------
        run
            Calls a function for each expert, as `map` does.
        """
        if not self.layout.packed:
            return self
        found = list(run(self._sizes, range(self.layout.config.num_experts)))
        packed = {
            part: PackedSpec(spec.layout, tuple(sizes[part] for sizes in found))
            for part, spec in self.layout.packed.items()
        }
        return replace(self, layout=replace(self.layout, packed=packed))

    def _order(self, part: str, matrix: Matrix) -> torch.Tensor | None:
        """Return the order of a matrix, which the file has of all experts or of none."""
        if part not in self.layout.orders or matrix.order is not None:
            return matrix.order
        return torch.arange(self.route.given[part].k, dtype=torch.int32, device="cpu")

    def _sizes(self, number: int) -> Sizes:
        matrices = self.route.read(number).matrices
        found = {}
        for part in self.layout.packed:
            try:
                found[part] = packed_size(self.backend, matrices[part], *self._formats(part))
            except ValueError as error:
                raise CheckpointError(f"{part} of expert {number}: {error}") from error
        return found

    def _formats(self, part: str) -> tuple[Format, Format]:
        return self.route.given[part].format, self.route.stored[part]

    def _packed(self, part: str, number: int, given: Matrix) -> Matrix:
        made = pack(self.backend, given, *self._formats(part))
        expected = self.layout.packed[part].sizes[number]
        if len(made) != expected:
            raise ValueError(f"it takes {len(made)} bytes, and took {expected} a moment ago")
        return replace(given, data=made, scale=None, zero=None)

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
            return replace(from_bytes(stored, *packed.exported()), factor=given.factor)
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
        if getattr(matrix, factor_name(route.stored[part])) is not None
    )
    packed = _packed_parts(route, factors)
    orders = tuple(part for part in layer.orders if not route.decodes(part))
    layout = Layout(layer.config, route.stored, biases, factors, packed, orders)
    return Encoder(number, layout, route)


def _packed_parts(route: Route, factors: tuple[str, ...]) -> dict[str, PackedSpec]:
    """Return what is kept as the backend packs it, as large as nearly all weights are."""
    backend, experts = route.backend, route.layer.config.num_experts
    kept = kept_layout(backend)
    found = {}
    for part, given in route.given.items():
        stored = route.stored[part]
        if kept is None or part in factors or not takes(backend, given, stored):
            continue
        size = backend.core.packed_size(stored, given.n, given.k)
        found[part] = PackedSpec(kept, (size,) * experts)
    return found


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
