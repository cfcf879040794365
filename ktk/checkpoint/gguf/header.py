"""Reads the header of one GGUF file: its metadata, and where its tensors lie.

gguf.GGUFReader does the same, but makes numpy arrays of every string: 7 s and half a gigabyte for
the vocabulary of Qwen3, which is skipped here in 0.03 s. It also refuses a file for a tensor nobody
asked for, does not say which, and follows damaged lengths without end.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGUF_DEFAULT_ALIGNMENT, GGUF_MAGIC, GGUFValueType

from ktk.checkpoint.files import File
from ktk.errors import CheckpointError

# Version 1 had lengths of 32 bits; nobody has published it since 2023.
_VERSIONS = (2, 3)
_MAX_DIMS = 4
# What is read of a file at a time.
_WINDOW = 1 << 20
# The standard's limit for names of entries and, in bytes, ours for values that anybody needs.
_LONGEST_NAME, _LARGEST_VALUE = 0xFFFF, 1 << 24
# The least bytes of an entry (name, type, value), of a tensor and of a string.
_LEAST_ENTRY, _LEAST_TENSOR, _LEAST_STRING = 8 + 4 + 1, 8 + 4 + 4 + 8, 8
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
    """An open file.

    `fields` has the metadata as Python values; arrays of numbers are numpy arrays, arrays of
    strings are left out, and so is whatever has more than 16 MiB.
    """

    file: File
    fields: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def path(self) -> Path:
        """Of the file."""
        return self.file.path


def open_file(path: Path) -> GgufFile:
    """Read the header of a file.

    Raises
    ------
    CheckpointError
        It is missing, not GGUF, of an unknown version, or its header is damaged.
    """
    file = File(path)
    start = file.read(0, min(4, file.size)).tobytes()
    if start != _U32.pack(GGUF_MAGIC):
        raise CheckpointError(f"{path} is not a GGUF file: it begins with {start!r}")
    try:
        found = _Parser(file).header()
    except (struct.error, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"{path} is damaged or truncated: its header cannot be read ({error})"
        ) from error
    file.close()
    return found


class _Parser:
    """Walks over a header. What would lie behind the end of the file is a struct.error."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.path = file.path
        self.at = 4
        self.begin, self.window = 0, b""

    def header(self) -> GgufFile:
        version = self.number(_U32)
        if version not in _VERSIONS:
            swapped = version & 0xFFFF == 0
            raise CheckpointError(
                f"{self.path} is a big-endian GGUF file; only little-endian ones are read"
                if swapped
                else f"{self.path} has GGUF version {version}; versions 2 and 3 are read"
            )
        tensors, fields = self.number(_U64), self.number(_U64)
        self.check(fields * _LEAST_ENTRY + tensors * _LEAST_TENSOR)
        metadata = self.metadata(fields)
        infos = self.tensors(tensors)
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path}: general.alignment is {alignment!r}, expected a power of two"
            )
        base = (self.at + alignment - 1) // alignment * alignment
        placed = {}
        for name, (shape, kind, offset) in infos.items():
            if offset % alignment:
                raise CheckpointError(
                    f"{self.path} is damaged: tensor {name} begins at byte {offset} of the data, "
                    f"expected a multiple of {alignment}"
                )
            placed[name] = TensorInfo(name, self.path, shape, kind, base + offset)
        return GgufFile(self.file, metadata, placed)

    def metadata(self, count: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        seen = set()
        for _ in range(count):
            name = self.name()
            if name in seen:
                raise CheckpointError(f"{self.path} has the entry {name} twice")
            seen.add(name)
            kind = self.kind(name)
            if kind == GGUFValueType.ARRAY:
                self.array(name, fields)
            elif kind == GGUFValueType.STRING:
                length = self.number(_U64)
                if length > _LARGEST_VALUE:
                    self.skip(length)
                else:
                    fields[name] = self.take(length).decode("utf-8")
            else:
                fields[name] = self.numbers(kind, 1)[0].item()
        return fields

    def array(self, name: str, fields: dict[str, Any]) -> None:
        kind, count = self.kind(name), self.number(_U64)
        if kind == GGUFValueType.ARRAY:
            raise CheckpointError(f"{self.path}: {name} is an array of arrays, which GGUF lacks")
        if kind == GGUFValueType.STRING:
            self.skip_strings(count)
        elif count * np.dtype(_DTYPES[kind]).itemsize > _LARGEST_VALUE:
            self.skip(count * np.dtype(_DTYPES[kind]).itemsize)
        else:
            fields[name] = self.numbers(kind, count)

    def skip_strings(self, count: int) -> None:
        """Pass over the vocabulary: hundreds of thousands of strings that nobody needs here."""
        self.check(count * _LEAST_STRING)
        length = _U64.unpack_from
        at, last = self.at - self.begin, len(self.window) - _U64.size
        for _ in range(count):
            if at > last:
                self.at = self.begin + at
                self.fill(_U64.size)
                at, last = 0, len(self.window) - _U64.size
            at += 8 + length(self.window, at)[0]
        self.at = self.begin + at
        self.check(0)

    def tensors(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Read shape, type and offset of each tensor."""
        found = {}
        for _ in range(count):
            name = self.name()
            if name in found:
                raise CheckpointError(f"{self.path} has the tensor {name} twice")
            dims = self.number(_U32)
            if dims > _MAX_DIMS:
                raise CheckpointError(
                    f"{self.path}: tensor {name} has {dims} dimensions, ggml has 4"
                )
            shape = tuple(self.number(_U64) for _ in range(dims))
            found[name] = shape[::-1], self.number(_U32), self.number(_U64)
        return found

    def kind(self, name: str) -> GGUFValueType:
        number = self.number(_U32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise CheckpointError(
                f"{self.path} is damaged: {name} has the unknown value type {number}"
            ) from None

    def number(self, of: struct.Struct) -> int:
        value: int = of.unpack(self.take(of.size))[0]
        return value

    def numbers(self, kind: GGUFValueType, count: int) -> np.ndarray:
        dtype = np.dtype(_DTYPES[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def name(self) -> str:
        length = self.number(_U64)
        if length > _LONGEST_NAME:
            raise struct.error(f"a name of {length} bytes, expected no more than {_LONGEST_NAME}")
        name = self.take(length).decode("utf-8")
        if not name.isprintable():
            raise struct.error(f"the name {name!a}")
        return name

    def take(self, length: int) -> bytes:
        """Return the next bytes."""
        start = self.at - self.begin
        if start + length > len(self.window):
            self.fill(length)
            start = 0
        self.at += length
        return self.window[start : start + length]

    def skip(self, length: int) -> None:
        self.check(length)
        self.at += length

    def fill(self, length: int) -> None:
        """Read what comes next, at least `length` bytes."""
        self.check(length)
        self.begin = self.at
        size = min(max(length, _WINDOW), self.file.size - self.at)
        self.window = self.file.read(self.at, size).tobytes()

    def check(self, length: int) -> None:
        if self.at + length > self.file.size:
            raise struct.error(f"{self.at + length} bytes expected, there are {self.file.size}")
