"""Finds and reads one matrix in codes by its name, whatever it is in the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from ktk._core import Format
from ktk.checkpoint.quantization import Quantization
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.scheme import Header, Layout, Scheme, StorageError
from ktk.checkpoint.safetensors.storage import PLAIN, SCHEMES
from ktk.checkpoint.safetensors.tensors import (
    USUAL_BITS,
    has_roles,
    layout_of,
    role_of,
    wrong_shapes,
    wrong_types,
)
from ktk.errors import CheckpointError
from ktk.expert import Matrix


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix that is stored in codes.

    Attributes
    ----------
    index
        Of the files.
    stem
        What the names of its tensors begin with: the name of a dense layer.
    scheme
        How it is stored.
    layout
        Its sizes.
    """

    index: TensorIndex
    stem: str
    scheme: Scheme
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.layout.n, self.layout.k

    @cached_property
    def format(self) -> Format:
        """What `read` returns; reads the scales, and not the elements."""
        fmt = self._decoded(values=False).format
        assert fmt is not None, "schemes know what they decode"
        return fmt

    def read(self) -> Matrix:
        """Read the matrix, and the bias beside it if there is one.

        Raises
        ------
        CheckpointError
            The tensors hold what ktk does not read.
        """
        bias = f"{self.stem}.bias"
        matrix = self._decoded(values=True)
        return replace(matrix, bias=self.index.tensor(bias)) if bias in self.index else matrix

    def _decoded(self, *, values: bool) -> Matrix:
        arrays = {}
        for role, part in self.scheme.tensors.items():
            name = self.stem + part.suffix
            if name in self.index:
                whole = values or role != "data"
                arrays[role] = self.index.tensor(name) if whole else self.index.stand_in(name)
        try:
            return self.scheme.decode(arrays, self.layout)
        except StorageError as error:
            data = self.stem + self.scheme.tensors["data"].suffix
            raise CheckpointError(f"{self.index.where(data)} {error}") from None


def find_matrix(index: TensorIndex, stem: str, quantization: Quantization) -> StoredMatrix | None:
    """Return how a matrix is stored in codes; None if it is floats, or ktk knows no such scheme.

    Parameters
    ----------
    index
        Of the files.
    stem
        The name of the matrix, without ".weight".
    quantization
        What config.json says of codes.

    Raises
    ------
    CheckpointError
        A tensor that says how many rows and columns there are does not, or nothing does.
    """
    for scheme in SCHEMES:
        if scheme is not PLAIN and (found := _as(scheme, index, stem, quantization)):
            return found
    return None


def stems(index: TensorIndex) -> list[str]:
    """Return what the names of matrices in codes may begin with, each once."""
    suffixes = {scheme.tensors["data"].suffix for scheme in SCHEMES}
    found = (
        name.removesuffix(suffix)
        for name in index.names()
        for suffix in suffixes
        if name.endswith(suffix)
    )
    return list(dict.fromkeys(found))


def _as(
    scheme: Scheme, index: TensorIndex, stem: str, quantization: Quantization
) -> StoredMatrix | None:
    headers = {
        role_of(part): Header(index.dtype(name), index.shape(name))
        for part in scheme.tensors.values()
        for name in [stem + part.suffix]
        if name in index
    }
    # There may be more, such as scales of activations.
    if not has_roles(scheme, headers) or any(wrong_types(scheme, headers)):
        return None
    n, k = _sizes_of(scheme, index, stem, headers, quantization)
    if min(n, k) < 1:
        return None
    layout = layout_of(scheme, headers, n, k, quantization)
    fits = not any(wrong_shapes(scheme, layout, headers))
    return StoredMatrix(index, stem, scheme, layout) if fits else None


def _sizes_of(
    scheme: Scheme,
    index: TensorIndex,
    stem: str,
    headers: Mapping[str, Header],
    quantization: Quantization,
) -> tuple[int, int]:
    """Return rows and columns: as a tensor says, or the shape of the elements; zeros if none do.

    Raises
    ------
    CheckpointError
        The tensor says something else, or there is none and codes may have several widths.
    """
    for role, read in scheme.sizes.items():
        name = stem + scheme.tensors[role].suffix
        if name not in index:
            continue
        try:
            n, k = read(index.tensor(name))
        except StorageError as error:
            raise CheckpointError(f"{index.where(name)} {error}") from None
        return n, k
    data = scheme.tensors["data"]
    words, shape = data.shape.split(), headers[role_of(data)].shape
    if len(words) != len(shape):
        return 0, 0
    sizes = {"N": 0, "K": 0}
    for word, extent in zip(words, shape, strict=True):
        product, _, divisor = word.partition("/")
        axis, _, bits = product.partition("*")
        if axis in sizes:
            if bits and quantization.mixed:
                raise CheckpointError(
                    f"{index.where(stem + data.suffix)} holds codes of a width that nothing tells: "
                    "config.json has several, and no weight_shape is beside it"
                )
            each = (quantization.bits or USUAL_BITS) if bits else 1
            sizes[axis] = extent * int(divisor or 1) // each
    return sizes["N"], sizes["K"]
