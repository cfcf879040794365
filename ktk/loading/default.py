"""Chooses a backend where the user names none: the format of the weights decides."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress

from ktk.backend import Backend
from ktk.checkpoint.reader import LayerReader
from ktk.errors import BackendError, CheckpointFormatError
from ktk.loading.route import route_of, taken
from ktk.registry import backends, load_backend

_log = logging.getLogger(__name__)

# The element that weights are stored in, and backends in order of preference: the first one that
# stores all of a layer losslessly is taken.
PREFERRED: Mapping[str, tuple[str, ...]] = {
    "bf16": ("BF16",),
    "f16": ("BF16",),
    "f32": ("BF16",),
    "e4m3": ("FP8",),
    "e2m1": ("MXFP4",),
    "u4": ("RAWINT4", "AMXINT4"),
    "i8": ("AMXINT8",),
}
_GGML = ("LLAMAFILE",)
# Backends for blocks that none of these takes, and that their reader decodes to floats.
_DECODED = ("BF16",)


def default_backend(layer: LayerReader) -> Backend:
    """Return the backend for a layer of a checkpoint: of packed files, the one they were made for.

    Parameters
    ----------
    layer
        From the method `layer` of an open checkpoint.

    Raises
    ------
    CheckpointFormatError
        No installed backend takes what is stored; the message has the reason of each one that was
        considered.
    """
    if layer.recorded_backend is not None:
        return load_backend(layer.recorded_backend)
    formats = layer.formats
    stored = ", ".join(dict.fromkeys(str(matrix.format) for matrix in formats.values()))
    reasons = []
    for name, exactly in _candidates({matrix.format.element for matrix in formats.values()}):
        try:
            backend = load_backend(name)
            given = taken(layer, backend)
        except (BackendError, CheckpointFormatError) as error:
            reasons.append(f"{name}: {error}")
            continue
        if given == formats or not exactly:
            _log.info("layer %d, stored as %s, is computed by %s", layer.number, stored, name)
            return backend
        reasons.append(f"{name}: takes it only after decoding")
    raise CheckpointFormatError(
        f"layer {layer.number} is stored as {stored}, and no backend takes that: "
        + "; ".join(reasons)
        + _advice(layer)
    )


def _advice(layer: LayerReader) -> str:
    """Name the backends that would decode a layer, and may have to be asked for by name."""
    able = []
    for name in backends():
        with suppress(BackendError, CheckpointFormatError):
            route_of(layer, load_backend(name))
            able.append(name)
    if not able:
        return ""
    return f". Named by backend=, any of these decodes and quantises the weights: {', '.join(able)}"


def _candidates(elements: set[str]) -> Iterator[tuple[str, bool]]:
    """Yield names of backends, and whether they must take the weights as they are stored."""
    lists = [PREFERRED.get(element, _GGML) for element in elements]
    # A file that mixes blocks and floats is one of blocks.
    preferred = _GGML if _GGML in lists else lists[0]
    yield from ((name, True) for name in preferred)
    yield from ((name, False) for name in _DECODED if name not in preferred)
