"""What the kit tests: one variant of a backend."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

import ktk
from ktk import _core
from ktk.config import PARTS
from ktk.testing import bounds, formats, reference, strategies
from ktk.testing.bounds import Array
from ktk.testing.formats import Source


@functools.cache
def pool(threads: int) -> ktk.WorkerPool:
    """Return a pool of that many threads; they need no core of their own."""
    return ktk.WorkerPool(threads, pin=False)


def round_up(size: int, step: int) -> int:
    """Return the next multiple of a step."""
    return -(-size // step) * step


def choose(variant: _core.VariantInfo, m: int) -> int:
    """Return the micro-kernel for m rows, as the core chooses it."""
    return next(i for i, (_, m_max) in enumerate(variant.ukernels) if m <= m_max)


@dataclasses.dataclass(frozen=True, repr=False)
class Subject(formats.Summary):
    """A backend and one of its variants, with the calls that the properties are made of."""

    backend: ktk.Backend
    variant: _core.VariantInfo

    def __repr__(self) -> str:
        return f"<{self.backend.name}-{self.variant.name}>"

    def act_of(self, stored: _core.Format) -> _core.Format:
        """How activations are stored that meet a weight in this format."""
        k = formats.fill_bytes(stored, 1) if formats.is_known(stored) else self.variant.k_step
        return self.variant.act_of(stored, self.variant.n_step, k)

    @property
    def unknown_act(self) -> _core.Format | None:
        """A format of activations that the kit does not know, if there is one."""
        acts = (self.act_of(stored) for stored in self.backend.formats)
        return next((act for act in acts if not formats.has_resolution(act)), None)

    def pack(self, source: Source, guard: str = "") -> _core.PackedMatrix:
        """Pack a weight matrix as what it shall be stored as; ``guard`` is as in PackedMatrix."""
        return _core.PackedMatrix(
            self.backend.core,
            self.variant.name,
            source.data,
            scale=source.scale,
            zero=source.zero,
            given=source.format,
            stored=source.stored,
            guard=guard,
        )

    def of_bytes(
        self, packed: npt.NDArray[np.uint8], like: _core.PackedMatrix
    ) -> _core.PackedMatrix:
        """Make a matrix of packed bytes, of the extents of another one."""
        core, name = self.backend.core, self.variant.name
        bytes_of = _core.PackedMatrix.of_bytes
        return bytes_of(core, name, packed[None], like.format, like.n, like.k, guard="weight")

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

    def run(self, matrix: _core.PackedMatrix, act: npt.NDArray[np.uint8], m: int) -> strategies.F32:
        """Multiply packed activations with the whole matrix."""
        width = round_up(round_up(matrix.n, self.variant.n_step), 16)
        dst = np.zeros((round_up(m, self.variant.m_step), width), np.float32)
        matrix.run_raw(act, m, 0, matrix.n, dst, choose(self.variant, m))
        return dst[:m, : matrix.n]

    def product(
        self, matrix: _core.PackedMatrix, problem: strategies.Problem
    ) -> tuple[Array, Array]:
        """Return the exact product of what is stored, and the bound for computing it."""
        act = matrix.act_round_trip(problem.act).astype(np.float64)
        weight = matrix.unpack().astype(np.float64)
        return act @ weight.T, bounds.dot(act, weight, reach=problem.source.reach)

    def reach(self, matrix: _core.PackedMatrix, problem: strategies.Problem) -> Array:
        """Bound how far a product may be from that of the given x and the stored weights."""
        weight = np.abs(matrix.unpack().astype(np.float64))
        act_bound = formats.codec_bound(matrix.act, np.abs(problem.act.astype(np.float64)))
        bound: Array = act_bound @ weight.T + self.product(matrix, problem)[1]
        return bound

    def moe(
        self, layer: strategies.Layer, *, threads: int = 2, shards: int | None = None
    ) -> ktk.MoE:
        """Make a layer and load its weights."""
        moe = ktk.MoE(
            self.backend,
            layer.config,
            variant=self.variant.name,
            pool=pool(threads),
            shards=shards,
            weight_format=layer.stored,
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
        out: str = "f32",
    ) -> reference.Uncertain:
        """Compute the layer in float64 from the weights that are stored."""
        experts = stored_experts(moe, layer)
        of_gate, of_up, of_down = (self.act_of(stored) for stored in layer.stored)
        return reference.bounded_layer(
            batch.hidden.astype(np.float64),
            batch.ids,
            batch.weights.astype(np.float64),
            experts,
            layer.config,
            (of_gate, of_up, of_down),
            [width for shard in moe._core.slices for width in shard],
            mask=mask,
            out=out,
        )


def stored_experts(moe: ktk.MoE, layer: strategies.Layer) -> list[reference.Expert]:
    """Return the experts of a layer as they are stored, with its biases."""
    experts = []
    for number in range(layer.config.num_experts):
        parts = zip(PARTS, moe.unpack_expert(number), strict=True)
        matrices: dict[str, Any] = {
            part: one.astype(np.float64) for part, one in parts if one is not None
        }
        biases: dict[str, Any] = {
            name: None if bias is None else bias[number].astype(np.float64)
            for name, bias in layer.biases.items()
        }
        reach = {part: getattr(layer, part)[number].reach for part in matrices}
        experts.append(reference.Expert(**matrices, **biases, reach=reach))
    return experts
