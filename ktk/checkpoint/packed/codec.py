"""Packs and unpacks matrices of files that keep the packed bytes of a backend."""

from __future__ import annotations

from typing import Any

import torch

from ktk import _core
from ktk._core import Format
from ktk.checkpoint.matrix import MatrixInfo
from ktk.errors import BackendUnsupported
from ktk.expert import Matrix
from ktk.protocols import BackendLike
from ktk.quantize import Quantized, from_bytes


def kept_layout(backend: BackendLike) -> str | None:
    """Return the packed layout that files keep of a backend: one that all its variants read."""
    layouts = {variant.layout for variant in backend.variants}
    if len(layouts) > 1 or not all(variant.checks_packed for variant in backend.variants):
        return None
    return layouts.pop()


def packed_size(backend: BackendLike, given: Matrix, here: Format, stored: Format) -> int:
    """Return the bytes that `pack` makes, found by a look at the weights."""
    return _core.PackedMatrix.size_of(*_arguments(backend, given), given=here, stored=stored)


def pack(backend: BackendLike, given: Matrix, here: Format, stored: Format) -> torch.Tensor:
    """Return a matrix, in a format that a backend takes, as it is packed, uint8 [bytes]."""
    made = _core.PackedMatrix(*_arguments(backend, given), given=here, stored=stored)
    return torch.from_numpy(made.buffer)


def _arguments(backend: BackendLike, given: Matrix) -> tuple[Any, ...]:
    return backend.core, "", given.data, given.scale, given.zero


def unpack(name: str, layout: str, info: MatrixInfo, data: torch.Tensor) -> Quantized:
    """Return what `pack` was given, in the format that is stored.

    Parameters
    ----------
    name
        Of the backend that packed it.
    layout
        That it is packed in.
    info
        Format and extents of the matrix.
    data
        The packed bytes, uint8 [bytes].

    Raises
    ------
    BackendError
        The backend is not installed, or nothing that runs here reads the layout.
    ValueError
        These are no packed bytes.
    """
    from ktk.registry import load_backend

    backend = load_backend(name)
    readers = (one for one in backend.variants if one.layout == layout and one.checks_packed)
    variant = next((one.name for one in readers if one.runnable), None)
    if variant is None:
        raise BackendUnsupported(
            f"no variant of {backend.info} that runs here reads the packed layout {layout}; "
            "convert the checkpoint again"
        )
    made = _core.PackedMatrix.of_bytes(
        backend.core, variant, data.reshape(1, -1), info.format, info.n, info.k
    )
    return from_bytes(info.format, *made.exported())
