"""The file of one dense layer: `ktk.Linear.save` writes it, and `from_file` reads it.

    | 8 bytes | JSON                              | tensors, without gaps                          |
    | length  | __metadata__: ktk_linear, its xxh3 | 0.data 0.scale 0.zero 0.order 1.data ... bias |

A tensor is the bytes of its rows, uint8 [rows, bytes], as a checkpoint would have them. Of backends
whose packed bytes files keep (ktk.checkpoint.packed.layout), a part is one tensor, 0.packed, uint8
[1, bytes]. Where a part's columns are in an order, as of `Matrix`, 0.order is that: the bytes of
int32. The header says in which format each part of the weight is, and has the checksum of each
tensor:

    ktk_linear       {"version": 1, "writer": "ktk 0.1.0", "backend": "AMXINT8",
                      "in_features": 2048, "out_features": 4096,
                      "parts": [{"rows": 4096, "factor": 1.0, "format": {...},
                                 "layout": "of 0.packed, or nothing"}],
                      "xxh3": {"0.data": "16 digits", ...}}
    ktk_linear_xxh3  the checksum of that text
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktk.checkpoint.entries import (
    EntryError,
    integer,
    items,
    number,
    parse_object,
    table,
    text,
)
from ktk.checkpoint.matrix import MatrixInfo
from ktk.checkpoint.packed.codec import kept_layout, pack, unpack
from ktk.checkpoint.packed.header import checksum, format_entries, hex_of, read_format, writer
from ktk.checkpoint.packed.layout import ALIGNMENT
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.durable import PendingFile
from ktk.errors import CheckpointError
from ktk.expert import Matrix
from ktk.quantize import from_bytes

VERSION = 1
# Of files that have columns in an order, which readers of the first version would not restore.
_ORDERED = 2
_PIECES = ("data", "scale", "zero")
_PACKED = "packed"
_ENTRY = "ktk_linear"


@dataclass(frozen=True)
class SavedLinear:
    """What a file holds.

    Attributes
    ----------
    backend
        That it was written for.
    in_features, out_features
        Columns and rows of the weight.
    parts
        Of the weight, as they are stored.
    bias
        f32 [out_features], if there is one.
    """

    backend: str
    in_features: int
    out_features: int
    parts: list[Matrix]
    bias: torch.Tensor | None

    @property
    def biases(self) -> list[torch.Tensor] | None:
        """The bias, part by part."""
        rows = [len(part.data) for part in self.parts]
        return None if self.bias is None else list(torch.split(self.bias, rows))


def write_linear(path: Path, linear: Any) -> None:
    """Write a `ktk.Linear`; the file is there when it is complete."""
    core = linear._core
    layout = kept_layout(linear.backend)
    tensors: dict[str, np.ndarray] = {}
    parts = []
    version = VERSION
    for index, (fmt, found) in enumerate(zip(linear.formats, core.exported(), strict=True)):
        *pieces, factor, order = found
        entry = {"rows": len(pieces[0]), "factor": factor, "format": format_entries(fmt)}
        if layout:
            packed = pack(linear.backend, from_bytes(fmt, *pieces), fmt, fmt)
            tensors[f"{index}.{_PACKED}"] = packed.numpy().reshape(1, -1)
            entry["layout"] = layout
        else:
            tensors |= {
                f"{index}.{name}": piece
                for name, piece in zip(_PIECES, pieces, strict=True)
                if piece.size
            }
        if order is not None:
            version = _ORDERED
            tensors[f"{index}.order"] = order.view(np.uint8).reshape(1, -1)
        parts.append(entry)
    if linear.bias:
        tensors["bias"] = core.bias()
    document = {
        "version": version,
        "writer": writer(),
        "backend": linear.backend.name,
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "parts": parts,
        "xxh3": {name: hex_of(checksum(_bytes(one))) for name, one in tensors.items()},
    }
    head = _header(json.dumps(document, separators=(",", ":")), tensors)
    pending = PendingFile(path, len(head) + sum(one.nbytes for one in tensors.values()))
    try:
        pending.write(head, 0)
        at = len(head)
        for one in tensors.values():
            pending.write(_bytes(one), at)
            at += one.nbytes
        pending.commit()
    except BaseException:
        pending.discard()
        raise


def read_linear(path: Path) -> SavedLinear:
    """Read a layer; every byte is checked.

    Raises
    ------
    CheckpointError
        The file is missing, damaged, or none of a dense layer that this version of ktk reads.
    """
    try:
        file = TensorFile(path)
        return _read(file)
    except EntryError as error:
        raise CheckpointError(
            f"{path} is damaged or truncated: {error}; save the layer again"
        ) from error


def _read(file: TensorFile) -> SavedLinear:
    path = file.path
    written = file.metadata.get(_ENTRY)
    if written is None:
        raise CheckpointError(
            f"{path} is no file of a dense layer: ktk.Linear.save writes such files, and its "
            f"metadata lacks the entry {_ENTRY}"
        )
    if file.metadata.get(f"{_ENTRY}_xxh3") != hex_of(checksum(written.encode())):
        raise EntryError("the checksum of its header is wrong")
    entries = parse_object(written.encode())
    version = integer("version", entries.get("version"))
    if version not in (VERSION, _ORDERED):
        raise CheckpointError(
            f"{path} has version {version} of ktk's files of dense layers, and this ktk reads "
            f"versions up to {_ORDERED}: it was written by {text('writer', entries.get('writer'))}"
        )
    sums = table("xxh3", entries.get("xxh3"))
    if sums.keys() != file.tensors.keys():
        raise EntryError(
            f"it holds {', '.join(file.tensors)}, and its header means {', '.join(sums)}"
        )
    tensors = {name: _checked(file, name, sums) for name in sums}
    file.close()
    backend = text("backend", entries.get("backend"))
    columns = integer("in_features", entries.get("in_features"), least=1)
    rows = integer("out_features", entries.get("out_features"), least=1)
    parts = [
        _part(index, table("parts", one), tensors, backend, columns)
        for index, one in enumerate(items("parts", entries.get("parts")))
    ]
    bias = tensors.get("bias")
    return SavedLinear(
        backend,
        columns,
        rows,
        parts,
        None if bias is None else torch.from_numpy(bias.reshape(-1)).view(torch.float32),
    )


def _part(
    index: int,
    entries: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    backend: str,
    columns: int,
) -> Matrix:
    fmt = read_format(f"part {index}", table("format", entries.get("format")))
    rows = integer("rows", entries.get("rows"), least=1)
    none = np.empty((rows, 0), np.uint8)
    data, scale, zero = (tensors.get(f"{index}.{name}", none) for name in _PIECES)
    packed = tensors.get(f"{index}.{_PACKED}")
    made: Matrix
    if packed is not None:
        layout = text("layout", entries.get("layout"))
        try:
            info = MatrixInfo(fmt, rows, columns)
            made = unpack(backend, layout, info, torch.from_numpy(packed).reshape(-1))
        except ValueError as error:
            raise EntryError(f"part {index}: {error}") from error
    elif len(data) != rows or not data.size:
        raise EntryError(f"part {index} has {len(data)} rows, expected {rows}")
    else:
        made = from_bytes(fmt, data, scale, zero)
    factor = number("factor", entries.get("factor"))
    if factor != 1:
        made = replace(made, factor=torch.tensor([factor], dtype=torch.float32, device="cpu"))
    order = tensors.get(f"{index}.order")
    if order is None:
        return made
    if order.nbytes != columns * 4:
        raise EntryError(f"part {index} has an order of {order.nbytes} bytes")
    return replace(made, order=torch.from_numpy(order.reshape(-1)).view(torch.int32))


def _checked(file: TensorFile, name: str, sums: Mapping[str, Any]) -> np.ndarray:
    tensor = file.read(name)
    if tensor.dtype != torch.uint8 or tensor.ndim != 2:
        raise EntryError(f"tensor {name} is {tensor.dtype} {list(tensor.shape)}")
    found: np.ndarray = tensor.numpy()
    if hex_of(checksum(_bytes(found))) != text(f"xxh3 of {name}", sums[name]):
        raise EntryError(f"the checksum of tensor {name} is wrong")
    return found


def _header(entry: str, tensors: Mapping[str, np.ndarray]) -> bytes:
    document: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            _ENTRY: entry,
            f"{_ENTRY}_xxh3": hex_of(checksum(entry.encode())),
        }
    }
    at = 0
    for name, one in tensors.items():
        place = [at, at + one.nbytes]
        document[name] = {"dtype": "U8", "shape": list(one.shape), "data_offsets": place}
        at += one.nbytes
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-(8 + len(body)) % ALIGNMENT)
    return len(body).to_bytes(8, "little") + body


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).data
