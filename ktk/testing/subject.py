"""What the kit tests: one variant of a backend."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

import ktk
from ktk import _core
from ktk.testing import bounds, formats, reference, strategies
from ktk.testing.bounds import Array
from ktk.testing.formats import Source
from ktk.testing.strategies import F32


@functools.cache
def pool(threads: int) -> ktk.WorkerPool:
    """Return a pool of that many threads; they need no core of their own."""
    return ktk.WorkerPool(threads, pin=False)


@dataclasses.dataclass(frozen=True, repr=False)
class Subject(formats.Summary):
    """A backend and one of its variants, with the calls that the properties are made of."""

    backend: ktk.Backend
    variant: _core.VariantInfo

    def __repr__(self) -> str:
        return f"<{self.backend.name}-{self.variant.name}>"

    @property
    def act(self) -> _core.Format:
        """How activations are stored."""
        return self.variant.act

    def pack(self, source: Source) -> _core.PackedMatrix:
        """Pack a weight matrix as what it shall be stored as."""
        return _core.PackedMatrix(
            self.backend.core,
            self.variant.name,
            source.data,
            scale=source.scale,
            zero=source.zero,
            given=source.format,
            stored=source.stored,
        )

    def repack(self, matrix: _core.PackedMatrix, source: Source, begin: int, end: int) -> None:
        """Pack some rows of a matrix once more."""
        matrix.repack(
            source.data,
            scale=source.scale,
            zero=source.zero,
            given=source.format,
            n_begin=begin,
            n_end=end,
        )

    def act_bound(self, x: F32) -> Array:
        """Bound the error of encoding activations."""
        return formats.codec_bound(self.act, np.abs(x.astype(np.float64)))

    def product(self, matrix: _core.PackedMatrix, x: F32) -> tuple[Array, Array]:
        """Return the exact product of what is stored, and the bound for computing it."""
        act = matrix.act_round_trip(x).astype(np.float64)
        weight = matrix.unpack().astype(np.float64)
        return act @ weight.T, bounds.dot(act, weight)

    def reach(self, matrix: _core.PackedMatrix, x: F32) -> Array:
        """Bound how far a product may be from that of the given x and the stored weights."""
        weight = np.abs(matrix.unpack().astype(np.float64))
        bound: Array = self.act_bound(x) @ weight.T + self.product(matrix, x)[1]
        return bound

    def moe(
        self, layer: strategies.Layer, *, threads: int = 2, shards: int | None = None
    ) -> ktk.MoE:
        """Make a layer and load its weights."""
        moe = self.backend.moe(
            **layer.config,
            variant=self.variant.name,
            pool=pool(threads),
            shards=shards,
            weight_format=layer.conversion.stored,
        )
        moe.load(**layer.arrays)
        return moe

    def expected(
        self,
        moe: ktk.MoE,
        layer: strategies.Layer,
        batch: strategies.Batch,
        *,
        mask: npt.NDArray[np.bool_] | None = None,
        shards: int = 1,
        out: str = "f32",
    ) -> reference.Uncertain:
        """Compute the layer in float64 from the weights that are stored."""
        experts = []
        for number in range(layer.config["num_experts"]):
            stored = [part.astype(np.float64) for part in moe.unpack_expert(number)]
            biases = [
                None if bias is None else bias[number].astype(np.float64)
                for bias in layer.biases.values()
            ]
            experts.append(reference.Expert(*stored, *biases))
        names = {field.name for field in dataclasses.fields(reference.Activation)}
        chosen: dict[str, Any] = {k: v for k, v in layer.config.items() if k in names}
        return reference.layer(
            batch.hidden.astype(np.float64),
            batch.ids,
            batch.weights.astype(np.float64),
            experts,
            reference.Activation(**chosen),
            self.act,
            mask=mask,
            shards=shards,
            out=out,
        )
