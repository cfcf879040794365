"""Reads the header of one GGUF file: its metadata, and where its tensors lie in the mapped file.

gguf.GGUFReader does the same, but makes numpy arrays of every string: 7 s and half a gigabyte for
the vocabulary of Qwen3, which is skipped here in 0.03 s. It also refuses a file for a tensor nobody
asked for, does not say which, and follows damaged lengths without end.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUFValueType

from ktk.errors import CheckpointError

# Version 1 had lengths of 32 bits; nobody has published it since 2023.
_VERSIONS = (2, 3)
_MAX_DIMS = 4
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_DTYPES = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file. `shape` has rows last, `begin` counts from the start of the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    type: int
    begin: int

    def __str__(self) -> str:
        return f"tensor {self.name} in {self.file}"


@dataclass(frozen=True)
class GgufFile:
    """A mapped file.

    `fields` has the metadata as Python values; arrays of numbers are numpy arrays, arrays of
    strings are left out.
    """

    path: Path
    data: mmap.mmap
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def open_file(path: Path) -> GgufFile:
    """Map a file and read its header.

    Raises
    ------
    CheckpointError
        It is missing, not GGUF, of an unknown version, or its header is damaged.
    """
    data = _map(path)
    try:
        return _Parser(path, data).file()
    except (struct.error, OverflowError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated: its header cannot be read ({error})"
        ) from error


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            start = file.read(4)
            if start != _U32.pack(GGUF_MAGIC):
                raise CheckpointError(f"{path} is not a GGUF file: it begins with {start!r}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


class _Parser:
    """Walks over a header. What would lie behind the end of the file is a struct.error."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 4

    def file(self) -> GgufFile:
        version = self.number(_U32)
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file; only little-endian ones are read"
                if swapped
                else f"{self.path} has GGUF version {version}; versions 2 and 3 are read"
            )
        tensors, fields = self.number(_U64), self.number(_U64)
        metadata = self.metadata(fields)
        infos = [self.tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}, expected a power of two"
            )
        base = (self.at + alignment - 1) // alignment * alignment
        placed: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in infos:
            if name in placed:
                raise CheckpointError(f"{self.path} has the tensor {name} twice")
            placed[name] = TensorInfo(name, self.path, shape, kind, base + offset)
        return GgufFile(self.path, self.data, metadata, placed)

    def metadata(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for _ in range(count):
            name = self.string()
            kind = self.kind(name)
            if kind == GGUFValueType.ARRAY:
                self.array(name, fields)
            elif kind == GGUFValueType.STRING:
                fields[name] = self.string()
            else:
                fields[name] = self.numbers(kind, 1)[0].item()
        return fields

    def array(self, name: str, fields: dict[str, Any]) -> None:
        kind, count = self.kind(name), self.number(_U64)
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: {name} is an array of arrays, which GGUF lacks")
        if kind != GGUFValueType.STRING:
            fields[name] = self.numbers(kind, count)
            return
        # The vocabulary: hundreds of thousands of strings that nobody needs here.
        at, length = self.at, _U64.unpack_from
        for _ in range(count):
            at += 8 + length(self.data, at)[0]
        self.at = at

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        dims = self.number(_U32)
        if dims > _MAX_DIMS:
            raise CheckpointError(f"{self.path}: tensor {name} has {dims} dimensions, ggml has 4")
        shape = tuple(self.number(_U64) for _ in range(dims))
        return name, shape[::-1], self.number(_U32), self.number(_U64)

    def kind(self, name: str) -> GGUFValueType:
        number = self.number(_U32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(
                f"{self.path} is damaged: {name} has the unknown value type {number}"
            ) from None

    def number(self, of: struct.Struct) -> int:
        value: int = of.unpack_from(self.data, self.at)[0]
        self.at += of.size
        return value

    def numbers(self, kind: GGUFValueType, count: int) -> np.ndarray:
        dtype = np.dtype(_DTYPES[kind])
        self.check(count * dtype.itemsize)
        values = np.frombuffer(self.data, dtype, count, self.at)
        self.at += values.nbytes
        return values

    def string(self) -> str:
        length = self.number(_U64)
        self.check(length)
        text = self.data[self.at : self.at + length].decode("utf-8")
        self.at += length
        return text

    def check(self, length: int) -> None:
        if self.at + length > len(self.data):
            raise struct.error(f"{self.at + length} bytes expected, there are {len(self.data)}")
