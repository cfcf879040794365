"""Lets transformers read the metadata of a GGUF file once and fast, where it does so twice, slowly.

It reads all of them, a vocabulary among them, for the configuration and again for the tokenizer, by
the class `gguf.GGUFReader`, which cuts a memory map into half a million arrays. Arrays of the class
`numpy.memmap` take four times as long to cut as plain ones.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import numpy as np
from gguf.gguf_reader import ReaderTensor


class PlainReader(gguf.GGUFReader):
    """Reads what `gguf.GGUFReader` reads, from a plain array over the same memory map.

    It refuses files with tensors of a type that it does not know, such as those of ik_llama.cpp.
    Here these have a name and no data, which is all that is asked for of them.

    transformers 5.23 takes the length of a key's name for the value, of gpt-oss' keys of scaled
    RoPE: it does not see them, and gguf_config.py reads them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(path)
        self.all_fields = self.fields
        hidden = "gpt-oss.rope.scaling."
        self.fields = OrderedDict(
            (name, field) for name, field in self.fields.items() if not name.startswith(hidden)
        )

    @property
    def data(self) -> Any:
        """The bytes of the file."""
        return self._plain

    @data.setter
    def data(self, mapped: Any) -> None:
        self._plain = np.asarray(mapped)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        types = {int(kind) for kind in gguf.GGMLQuantizationType}
        known: list[Any] = []
        others: list[Any] = []
        for field in fields:
            (known if int(field.parts[4][0]) in types else others).append(field)
        super()._build_tensors(start_offs, known)
        for field in others:
            _, name, _, shape, kind, offset = field.parts
            self.tensors.append(
                ReaderTensor(
                    name=bytes(name).decode(),
                    tensor_type=kind[0],
                    shape=shape,
                    n_elements=0,
                    n_bytes=0,
                    data_offset=start_offs + int(offset[0]),
                    data=np.empty(0, np.uint8),
                    field=field,
                )
            )


def metadata_of(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what a file says of itself, by key, but for arrays; read once inside `read_once`."""
    module: Any = gguf
    reader = module.GGUFReader(path)
    fields = getattr(reader, "all_fields", reader.fields)
    is_array = gguf.GGUFValueType.ARRAY
    return {
        name: field.contents()
        for name, field in fields.items()
        if field.types and field.types[0] != is_array
    }


@contextmanager
def read_once() -> Iterator[None]:
    """While this is open, whoever takes `GGUFReader` from gguf reads the metadata of a file once.

    A file that has changed is read again. Readers are let go at the end. Inside another one this
    does nothing.
    """
    module: Any = gguf  # of which transformers takes the class when it reads
    stock = module.GGUFReader
    if getattr(stock, "reads_once", False):
        yield
        return
    readers: dict[tuple[Any, ...], PlainReader] = {}

    def reader(path: str | os.PathLike[str], mode: str = "r") -> Any:
        if mode != "r":
            return stock(path, mode)
        stat = os.stat(path)
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if key not in readers:
            readers[key] = PlainReader(path)
        return readers[key]

    marked: Any = reader
    marked.reads_once = True
    module.GGUFReader = marked
    try:
        yield
    finally:
        module.GGUFReader = stock
