"""Brings the experts of any checkpoint into what a backend stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ktk import _core
from ktk._core import Format
from ktk.errors import CheckpointError, CheckpointFormatError
from ktk.formats import same_format
from ktk.packed.layout import PARTS, Layout, extents
from ktk.quantize import Quantized, from_bytes, quantize

if TYPE_CHECKING:
    from ktk.backend import Backend
    from ktk.checkpoint.open import OpenCheckpoint

_FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Encoder:
    """Reads the experts of one layer, and makes what its file will hold.

    Attributes
    ----------
    number
        Number of the layer.
    layout
        What the file will hold.
    how
        What happens to the weights, for people: "stored as they are", "quantised by AMXINT8" ...
    """

    number: int
    layout: Layout
    how: str
    backend: Backend
    read: Callable[[int], Mapping[str, Any]]

    def expert(self, expert: int) -> dict[str, torch.Tensor]:
        """Return the arrays of one expert, as `Layout.specs` has them.

        Raises
        ------
        CheckpointError
            A weight is not finite, where that cannot be stored.
        """
        read = self.read(expert)
        arrays: dict[str, torch.Tensor] = {}
        for part, given in _matrices(read).items():
            try:
                made = _encode(self.backend, given, self.layout.formats[part])
            except ValueError as error:
                raise CheckpointError(
                    f"{part} of expert {expert} in layer {self.number}: {error}"
                ) from error
            arrays[part] = made.data
            for what, array in (("scale", made.scale), ("zero", made.zero)):
                if array is not None:
                    name = f"{part}_{what}"
                    arrays[name] = array.reshape(self.layout.specs[name].shape)
        for part in self.layout.biases:
            arrays[f"{part}_bias"] = torch.as_tensor(read[f"{part}_bias"]).float()
        return arrays


def plan_layer(
    checkpoint: OpenCheckpoint, number: int, backend: Backend, group_size: int | None
) -> Encoder:
    """Find out what a backend makes of a layer; reads one expert.

    Where the backend takes what is stored, it gets that, and keeps each bit if it can. Otherwise
    the weights are decoded to f32 and quantised: by the backend, or by `ktk.quantize` if it only
    takes ready codes.

    Raises
    ------
    CheckpointError
        The layer is incomplete or damaged.
    CheckpointFormatError
        There is no way from what is stored to what the backend stores, or none with such groups.
    """
    layer = checkpoint.layer(number)
    config = checkpoint.config_of(layer)
    refusal = ""
    for decoded, read in _readers(checkpoint, layer, backend):
        first = read(0)
        matrices = _matrices(first)
        formats, reasons = {}, []
        for part, given in matrices.items():
            n, k = extents(config, part)
            try:
                formats[part] = _stored(backend, given.format, n, k, group_size, decoded)
            except ValueError as error:
                reasons.append(f"{part}: {error}")
        if reasons:
            refusal = reasons[0]
            continue
        biases = tuple(part for part in PARTS if f"{part}_bias" in first)
        factors = tuple(
            part
            for part in PARTS
            if formats[part].scale == "none" and matrices[part].scale is not None
        )
        how = _describe(backend, matrices, formats, decoded)
        return Encoder(number, Layout(config, formats, biases, factors), how, backend, read)
    _, stored = checkpoint.storage(layer)
    raise CheckpointFormatError(
        f"layer {number} holds {stored}, and {backend.name} cannot be made of that: {refusal}"
    )


def _readers(
    checkpoint: OpenCheckpoint, layer: Any, backend: Backend
) -> Iterator[tuple[bool, Callable[[int], Mapping[str, Any]]]]:
    """Yield ways to read an expert: as it is stored if the backend takes it, and as f32."""
    with suppress(CheckpointFormatError):
        yield False, checkpoint.reader(layer, backend)
    yield True, lambda expert: checkpoint.values(layer, expert, torch.float32)


def _stored(
    backend: Backend, given: Format, n: int, k: int, group_size: int | None, decoded: bool
) -> Format:
    """Choose what to store; ValueError if there is nothing."""
    if group_size is None:
        try:
            chosen: Format = backend.core.stored_as(given, n, k)
        except ValueError:
            if not decoded:
                raise
            chosen = _made_of_floats(backend)
    else:
        chosen = _grouped(backend, given, n, k, group_size, decoded)
    columns, _ = chosen.block
    if k % columns:
        raise ValueError(f"a depth of {k} does not fill whole bytes of {chosen.element}")
    return chosen


def _made_of_floats(backend: Backend) -> Format:
    """Return what `quantize` can make for a backend that takes no floats."""
    chosen: Format = backend.formats[0]
    if chosen.scale == "none" and chosen.element not in _FLOATS.values():
        raise ValueError(f"it takes weights as they are, such as {chosen}, and makes none")
    return chosen


def _grouped(
    backend: Backend, given: Format, n: int, k: int, group_size: int, decoded: bool
) -> Format:
    fitting = [
        fmt
        for fmt in backend.formats
        if fmt.scale != "none" and fmt.group_n == 1 and (fmt.group_k or k) == (group_size or k)
    ]
    if not fitting:
        groups = {fmt.group_k for fmt in backend.formats if fmt.scale != "none"}
        offered = ", ".join(str(group) if group else "0 (rows)" for group in sorted(groups))
        raise ValueError(f"{backend.name} has no groups of {group_size}, but {offered or 'none'}")
    taken = (fmt for fmt in fitting if _takes(backend, given, n, k, fmt))
    chosen = next(taken, fitting[0] if decoded else None)
    if chosen is None:
        raise ValueError(f"{backend.name} makes no groups of {group_size} of {given}")
    return chosen


def _takes(backend: Backend, given: Format, n: int, k: int, stored: Format) -> bool:
    try:
        backend.core.stored_as(given, n, k, stored)
    except ValueError:
        return False
    return True


def _encode(backend: Backend, given: Quantized, stored: Format) -> Quantized:
    n, k = _shape(given)
    if same_format(given.format, stored, n, k):
        return given
    if _exports(backend) and _takes(backend, given.format, n, k, stored):
        arrays: Any = (given.data, given.scale, given.zero)
        packed = _core.PackedMatrix(backend.core, "", *arrays, given=given.format, stored=stored)
        return from_bytes(stored, *packed.exported())
    return quantize(given.dequantize(torch.float32), stored)


def _exports(backend: Backend) -> bool:
    """Whether what the backend packed can be had again, by the variant that would run here."""
    chosen = backend.core.default_variant()
    return any(variant.exports for variant in backend.variants if variant.name == chosen)


def _describe(
    backend: Backend,
    given: Mapping[str, Quantized],
    stored: Mapping[str, Format],
    decoded: bool,
) -> str:
    if all(same_format(given[part].format, stored[part], *_shape(given[part])) for part in PARTS):
        return "decoded to f32" if decoded else "stored as they are"
    by_backend = _exports(backend) and all(
        _takes(backend, given[part].format, *_shape(given[part]), stored[part]) for part in PARTS
    )
    plain = all(fmt.scale == "none" for fmt in stored.values())
    what = "rounded" if plain else f"quantised by {backend.name if by_backend else 'ktk.quantize'}"
    return f"decoded to f32 and {what}" if decoded else what


def _matrices(read: Mapping[str, Any]) -> dict[str, Quantized]:
    """Put the arguments of `MoE.load_expert` together, gate, up and down."""
    given = read.get("given")
    formats = given if isinstance(given, tuple) else (given,) * len(PARTS)
    found = {}
    for part, fmt in zip(PARTS, formats, strict=True):
        data = torch.as_tensor(read[part])
        scale, zero = (
            None if array is None else torch.as_tensor(array)
            for array in (read.get(f"{part}_{what}") for what in ("scale", "zero"))
        )
        found[part] = Quantized(fmt or Format(_FLOATS[data.dtype]), data, scale, zero)
    return found


def _shape(matrix: Quantized) -> tuple[int, int]:
    columns, nbytes = matrix.format.block
    n, items = matrix.data.shape
    return n, items * matrix.data.element_size() // nbytes * columns
