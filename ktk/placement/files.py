"""JSON files of this package: what kind they are of stands in each."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ktk.checkpoint.files import read_json
from ktk.durable import write_file
from ktk.errors import CheckpointError

_VERSION = 1
# As `write_document` writes it: '03' might be there beside '3'.
_LAYER = re.compile(r"0|[1-9][0-9]{0,8}")


def layer_names(layers: Mapping[int, Any]) -> dict[str, Any]:
    """Return the rows of layers, ascending, by the names that a document has for them.

    Raises
    ------
    ValueError
        There are no layers, or a number is none of a layer.
    TypeError
        What is to be a number is no int.
    """
    if not layers:
        raise ValueError("there are no layers to write")
    named = {str(operator.index(number)): layers[number] for number in sorted(layers)}
    for name in named:
        if not _LAYER.fullmatch(name):
            raise ValueError(f"{name} is no number of a layer: they are counted from 0 on")
    return named


def whole_numbers(layer: int | str, given: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Return a layer's counts of experts as they are written; ValueError if they are none."""
    row = np.asarray(given)
    is_row = row.ndim == 1 and row.size and row.dtype.kind in "biuf"
    with np.errstate(invalid="ignore"):
        whole = row.astype(np.int64) if is_row else None
    if whole is None or (whole < 0).any() or not (whole == row).all():
        raise ValueError(
            f"layer {layer}: counts must be whole numbers from 0 on, below 2**63, one each"
        )
    return whole


def write_document(path: Path, kind: str, content: Mapping[str, Any]) -> None:
    """Write a document, a line for each of its layers, which are of `layer_names`."""
    rows = {name: value for name, value in content.items() if name != "layers"}
    head = json.dumps({"format": kind, "version": _VERSION, **rows})[:-1]
    layers = ",\n".join(
        f" {json.dumps(name)}: {json.dumps(row)}" for name, row in content["layers"].items()
    )
    data = f'{head}, "layers": {{\n{layers}\n}}}}\n'.encode()
    try:
        write_file(path, data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror}") from error


def read_document(path: Path, kind: str) -> dict[str, Any]:
    """Read a document of a kind, or raise a `CheckpointError` that names the file."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing")
    document = read_json(path)
    found, version = document.get("format"), document.get("version")
    if found != kind:
        raise CheckpointError(f"{path} is no file of {kind}: its format is {found!r}")
    if version != _VERSION:
        raise CheckpointError(
            f"{path} has version {version!r} of {kind}, this ktk reads {_VERSION}"
        )
    return document


def layers_in(
    path: Path, document: Mapping[str, Any], right: Callable[[Any], bool]
) -> dict[int, list[int]]:
    """Return the rows of a document by layer, ascending, each of whose entries is right."""
    layers = document.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise CheckpointError(f"{path} has no layers")
    found = {}
    for name, row in layers.items():
        if not _LAYER.fullmatch(name):
            shown = repr(name) if len(name) <= 20 else f"{name[:20]!r}..."
            raise CheckpointError(f"{path} has a layer {shown}, expected a number such as '3'")
        entries = row if isinstance(row, list) else [row]
        wrong = [one for one in entries if entries is not row or not right(one)]
        if wrong:
            raise CheckpointError(f"{path}, layer {name}: {wrong[0]!r} is no such number")
        found[int(name)] = row
    return dict(sorted(found.items()))
