"""Chooses a backend where the user names none: the format of the weights decides."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import suppress

from ktk.backend import Backend
from ktk.checkpoint.reader import LayerReader
from ktk.errors import BackendError, CheckpointFormatError
from ktk.loading.route import route_of, taken
from ktk.names import BLOCKS, DECODED, PREFERRED
from ktk.registry import backends, load_backend

_log = logging.getLogger(__name__)


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
    for name, exactly in candidates({matrix.format.element for matrix in formats.values()}):
        try:
            backend = load_backend(name)
            given = taken(layer, backend) if exactly else route_of(layer, backend).given
        except (BackendError, CheckpointFormatError) as error:
            reasons.append(f"{name}: {error}")
            continue
        # The same codes in finer groups are as good.
        same = (given[part].format.element == one.format.element for part, one in formats.items())
        if not exactly or all(same):
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


def candidates(elements: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield names of backends, and whether they must take the weights as they are stored."""
    lists = [PREFERRED.get(element, BLOCKS) for element in elements]
    # A file that mixes blocks and floats is one of blocks.
    preferred = BLOCKS if BLOCKS in lists else lists[0]
    yield from ((name, True) for name in preferred)
    yield from ((name, False) for name in DECODED if name not in preferred)
