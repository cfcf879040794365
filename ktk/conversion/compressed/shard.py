"""Writes a safetensors file whose tensors come in any order, and tells later if it is whole.

    | 8 bytes | JSON, then blanks                                  | tensors, without gaps |
    | length  | name: dtype, shape, data_offsets; __metadata__     | large elements first  |

The header fills whole words of 8 bytes, so that every tensor begins at a multiple of its elements'
size. The metadata have ``format``, which transformers asks for, and ``xxh3``, a checksum over those
of all tensors, 16 digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

import xxhash

from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.files import File
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.conversion.compressed.formats import TensorSpec
from ktk.conversion.resume import joined
from ktk.durable import PendingFile
from ktk.errors import CheckpointError

_CHECKSUM = "xxh3"
_WORD = 8
# Bytes that are read at a time.
CHUNK = 1 << 26


class Shard:
    """What a file is to hold."""

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self.path = path
        self.specs = sorted(specs, key=lambda spec: -_itemsize(spec))
        self.data = len(self._header(0))

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.data + sum(spec.nbytes for spec in self.specs)

    def header(self, digests: list[int]) -> bytes:
        """Return all that stands before the tensors, given the checksum of each."""
        return self._header(joined(digests))

    def is_whole(self) -> bool:
        """Whether the file is there as it was written; reads all of it."""
        try:
            file, tensors = File(self.path), TensorFile(self.path)
            if file.size != self.nbytes:
                return False
            digests = []
            for spec in self.specs:
                state = xxhash.xxh3_64()
                for begin in range(0, spec.nbytes, CHUNK):
                    length = min(CHUNK, spec.nbytes - begin)
                    state.update(tensors.read_bytes(spec.name, begin, length).numpy().data)
                digests.append(state.intdigest())
            return file.read(0, self.data).tobytes() == self.header(digests)
        except (CheckpointError, EntryError, KeyError, AssertionError):
            return False

    def _header(self, checksum: int) -> bytes:
        entries: dict[str, object] = {
            "__metadata__": {"format": "pt", _CHECKSUM: f"{checksum:016x}"}
        }
        end = 0
        for spec in self.specs:
            begin, end = end, end + spec.nbytes
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _WORD)
        return len(text).to_bytes(_WORD, "little") + text


class ShardWriter:
    """A file in the making; several threads may write, each its own tensors."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._file = PendingFile(shard.path, shard.nbytes)
        self._next: dict[str, int] = {}
        self._states: dict[str, xxhash.xxh3_64] = {}
        for spec, begin in _places(shard):
            self._next[spec.name] = begin
            self._states[spec.name] = xxhash.xxh3_64()

    def append(self, name: str, data: memoryview) -> None:
        """Write what follows in a tensor."""
        self._file.write(data, self._next[name])
        self._next[name] += len(data)
        self._states[name].update(data)

    def commit(self) -> None:
        """Finish the file."""
        for spec, begin in _places(self.shard):
            assert self._next[spec.name] == begin + spec.nbytes, f"{spec.name} is not whole"
        digests = [self._states[spec.name].intdigest() for spec in self.shard.specs]
        self._file.write(self.shard.header(digests), 0)
        self._file.commit()

    def discard(self) -> None:
        """Give up."""
        self._file.discard()


def _places(shard: Shard) -> Iterator[tuple[TensorSpec, int]]:
    begin = shard.data
    for spec in shard.specs:
        yield spec, begin
        begin += spec.nbytes


def _itemsize(spec: TensorSpec) -> int:
    return spec.nbytes // max(math.prod(spec.shape), 1)
