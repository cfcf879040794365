"""One expert of a layer: three matrices, as readers give them and `MoE.load_expert` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ktk._core import Format
from ktk.arrays import Array
from ktk.config import PARTS


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight [n, k] in arrays, with what belongs to it.

    Attributes
    ----------
    format : Format or None
        What the arrays hold; None where their dtypes tell.
    data : array [n, items of a row]
        [n, k] of floats, int8 or 8-bit floats; [n, k / 2] where two 4-bit elements share a byte,
        the even column in the low half; of ggml's types uint8 [n, bytes of a row].
    scale, zero : array [groups of n, groups of k] or None
        Beside blocks of ggml, a scale of one f32 multiplies the whole matrix.
    bias : array [n] or None
        What is added to the product.
    factor : array [1] or None
        An f32 that multiplies the whole matrix, beside its scales: NVFP4 has one. A value is
        ``(element * scale) * factor``; products are multiplied with it when their sum is complete.
    order : array [k] of int32 or None
        Where the columns of `data` belong, each of 0 to k - 1 once: its column i is column
        ``order[i]`` of the matrix. Groups are those of `data`. None: they are where they belong.
    """

    format: Format | None
    data: Array
    scale: Array | None = None
    zero: Array | None = None
    bias: Array | None = None
    factor: Array | None = None
    order: Array | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Expert:
    """The weights of one expert.

    Attributes
    ----------
    gate, up : Matrix
        [intermediate_size, hidden_size]. Of gate None, where experts have none.
    down : Matrix
        [hidden_size, intermediate_size].
    """

    gate: Matrix | None = None
    up: Matrix
    down: Matrix

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, Array | None], formats: Mapping[str, Format | None]
    ) -> Expert:
        """Make an expert of arrays by name; see `arrays`. `formats` has one for each matrix."""
        beside = ("scale", "zero", "bias", "factor", "order")
        matrices = {
            part: Matrix(
                formats[part], arrays[part], *(arrays.get(f"{part}_{what}") for what in beside)
            )
            for part in PARTS
            if part in formats
        }
        return cls(**matrices)

    @property
    def matrices(self) -> dict[str, Matrix]:
        """Gate, if there is one, up and down by name."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return {**gate, "up": self.up, "down": self.down}

    def arrays(self) -> dict[str, Array]:
        """Return the arrays that are there by name: ``gate``, ``gate_scale``, ``gate_bias`` ..."""
        found: dict[str, Array] = {}
        for part, matrix in self.matrices.items():
            found |= {
                part: matrix.data,
                f"{part}_scale": matrix.scale,
                f"{part}_zero": matrix.zero,
                f"{part}_bias": matrix.bias,
                f"{part}_factor": matrix.factor,
                f"{part}_order": matrix.order,
            }
        return {name: array for name, array in found.items() if array is not None}
