"""Writes the file of one layer, expert by expert."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ktk.checkpoint.packed.header import Header, checksum, to_bytes
from ktk.durable import PendingFile
from ktk.expert import Expert


class LayerWriter:
    """A packed file in the making; nobody sees it before `commit`.

    `put` may be called by several threads, in any order of experts: the bytes of the file are the
    same.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self._header = header
        self._begin = len(to_bytes(header))
        self._file = PendingFile(path, file_size(header))
        self._checksums = {
            name: [0] * header.layout.config.num_experts for name in header.layout.specs
        }
        self._missing = set(range(header.layout.config.num_experts))

    def put(self, number: int, expert: Expert) -> None:
        """Write one expert, in the formats of the layout, or packed."""
        layout = self._header.layout
        arrays = layout.tensors(number, expert)
        assert arrays.keys() == expert.arrays().keys(), f"expert {number} has {sorted(arrays)}"
        for name, spec in layout.specs.items():
            array = arrays[name]
            shape = spec.shape_of(number)
            assert (array.dtype, tuple(array.shape)) == (spec.torch_dtype, shape), name
            data = bytes_of(array)
            self._checksums[name][number] = checksum(data)
            self._file.write(data, self._begin + layout.place(name, number)[0])
        self._missing.discard(number)

    def commit(self, read: int) -> None:
        """Finish the file; `read` is the checksum of what was read for it."""
        assert not self._missing, f"experts {sorted(self._missing)} are missing"
        checksums = {name: tuple(found) for name, found in self._checksums.items()}
        self._file.write(to_bytes(replace(self._header, checksums=checksums, read=read)), 0)
        self._file.commit()

    def discard(self) -> None:
        """Give up."""
        self._file.discard()


def bytes_of(array: torch.Tensor) -> memoryview:
    """Return what a tensor holds, without a copy if it is contiguous."""
    return array.contiguous().view(torch.uint8).numpy().reshape(-1).data


def file_size(header: Header) -> int:
    """Return the size of the finished file."""
    return len(to_bytes(header)) + header.layout.nbytes
