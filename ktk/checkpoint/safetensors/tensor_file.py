"""One safetensors file: what its header says, and its tensors, which are read and never mapped.

    | 8 bytes | JSON                                               | tensors, without gaps |
    | length  | name: dtype, shape, data_offsets; __metadata__     |

The safetensors package maps files and does not say where their tensors lie; a truncated file would
end the process (see `files`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ktk.checkpoint.dtypes import TORCH_DTYPES
from ktk.checkpoint.entries import (
    MOST_JSON,
    EntryError,
    integers,
    parse_object,
    printable,
    table,
    text,
)
from ktk.checkpoint.files import File
from ktk.errors import CheckpointError
from ktk.unread import Unread

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
# Bytes of a file, rather than extents.
_ANY = 1 << 63
# The product of very many extents takes hours.
_MOST_AXES = 16


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of a file: `dtype` as safetensors spells it, `begin` from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int


class TensorFile:
    """A safetensors file.

    Attributes
    ----------
    path
        Of the file.
    metadata
        Its strings by name.
    tensors
        What it holds, by name.

    Raises
    ------
    CheckpointError
        It is missing (`MissingFile`), no regular file, or not to be opened.
    EntryError
        It is damaged or truncated. The message does not name the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = File(path)
        self.metadata, self.tensors = _header(self._file)
        self.close()

    def read(
        self,
        name: str,
        index: int | None = None,
        joined: int | None = None,
        later: Unread | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or one item of its first axis, into memory of its own.

        A single number is that of any item. Of `joined` items that share the first axis, an item
        has as many rows. `later`: see `File.read`.
        """
        info = self.tensors[name]
        begin, nbytes, shape = info.begin, info.nbytes, info.shape
        if index is not None and shape not in ((), (1,)):
            items, shape = joined or shape[0], _item(shape, joined)
            assert 0 <= index < items
            nbytes //= items
            begin += index * nbytes
        dtype = self._dtype(info)
        return torch.from_numpy(self._file.read(begin, nbytes, later)).view(dtype).reshape(shape)

    def read_bytes(self, name: str, begin: int, nbytes: int) -> torch.Tensor:
        """Read bytes of a tensor, counted from its first, uint8 [nbytes]."""
        info = self.tensors[name]
        assert 0 <= begin <= begin + nbytes <= info.nbytes
        return torch.from_numpy(self._file.read(info.begin + begin, nbytes))

    def stand_in(
        self, name: str, index: int | None = None, joined: int | None = None
    ) -> torch.Tensor:
        """Return a tensor without values, for questions of format and shape."""
        info = self.tensors[name]
        shape = info.shape if index is None else _item(info.shape, joined)
        return torch.empty(shape, dtype=self._dtype(info), device="meta")

    def close(self) -> None:
        """Close the file; reading opens it again."""
        self._file.close()

    def _dtype(self, info: TensorInfo) -> torch.dtype:
        try:
            return TORCH_DTYPES[info.dtype]
        except KeyError:
            raise CheckpointError(
                f"tensor {printable(info.name)} in {self.path} has elements of type "
                f"{printable(info.dtype)}, which ktk does not read"
            ) from None


def _item(shape: tuple[int, ...], joined: int | None) -> tuple[int, ...]:
    """Return the shape of one of the items, or of those `joined`, in the first axis."""
    return shape[1:] if joined is None else (shape[0] // joined, *shape[1:])


def _header(file: File) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    if file.size < 8:
        raise EntryError(f"it has {file.size} bytes")
    length = int.from_bytes(file.read(0, 8).tobytes(), "little")
    begin = 8 + length
    if length > MOST_JSON or begin > file.size:
        raise EntryError(f"its header claims {length} bytes, and it has {file.size}")
    document = parse_object(file.read(8, length).tobytes())
    metadata = table("__metadata__", document.pop("__metadata__", {}))
    strings = {name: text(f"{name} of __metadata__", value) for name, value in metadata.items()}
    tensors = sorted(_tensors(document, begin), key=lambda tensor: (tensor.begin, tensor.nbytes))
    end = begin
    for tensor in tensors:
        if tensor.begin != end:
            raise EntryError(
                f"tensor {printable(tensor.name)} begins at byte {tensor.begin - begin}, expected "
                f"{end - begin}"
            )
        end += tensor.nbytes
    if end != file.size:
        raise EntryError(f"its tensors end at byte {end}, and it has {file.size}")
    return strings, {one.name: one for one in tensors}


def _tensors(document: dict[str, Any], first: int) -> Iterator[TensorInfo]:
    """Yield what the header lists; offsets in it are counted from byte `first` of the file."""
    for name, value in document.items():
        if not name.isprintable():
            raise EntryError(f"it has a tensor called {printable(name)}")
        entry = table(f"tensor {name}", value)
        dtype = text(f"dtype of tensor {name}", entry.get("dtype"))
        shape = integers(f"shape of tensor {name}", entry.get("shape"), most=_ANY)
        shown = printable(name)
        if len(shape) > _MOST_AXES:
            raise EntryError(
                f"tensor {shown} has {len(shape)} dimensions, and ktk reads {_MOST_AXES} at most"
            )
        offsets = entry.get("data_offsets")
        begin, end = integers(f"data_offsets of tensor {name}", offsets, 2, most=_ANY)
        if end < begin:
            raise EntryError(f"tensor {shown} ends at byte {end}, before it begins at {begin}")
        known = TORCH_DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise EntryError(
                f"tensor {shown} is {dtype} {list(shape)} in {end - begin} bytes, which do not fit"
            )
        yield TensorInfo(name, dtype, shape, first + begin, end - begin)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as safetensors spells it, or as torch does if it has no such name."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))
