"""The metadata of a GGUF file are read once for tokenizer and configuration, from a plain array."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import gguf
import gguf_model
import numpy as np
import pytest

from ktk.text.load import load_text_model
from ktk.transformers.gguf_metadata import PlainReader, read_once


def test_what_is_read_is_what_gguf_reads(tmp_path: Path) -> None:
    path, _ = gguf_model.write(tmp_path)
    stock, plain = gguf.GGUFReader(path), PlainReader(path)
    assert type(plain.data) is np.ndarray
    assert list(plain.fields) == list(stock.fields)
    for name, field in stock.fields.items():
        assert field.contents() == plain.fields[name].contents()
    for one, other in zip(stock.tensors, plain.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type)
        assert np.array_equal(one.data, other.data)


def test_tensors_of_types_that_gguf_does_not_know_have_names(tmp_path: Path) -> None:
    path, _ = gguf_model.write(tmp_path, dense="iq6_k")
    with pytest.raises(ValueError, match="141"):
        gguf.GGUFReader(path)
    reader = PlainReader(path)
    assert {"output.weight", "output_norm.weight"} <= {one.name for one in reader.tensors}
    assert int(reader.fields["GGUF.tensor_count"].parts[-1][0]) == len(reader.tensors)


def test_a_model_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = gguf_model.write(tmp_path)
    read = []
    stock = gguf.GGUFReader
    first = stock.__init__

    def counted(self: Any, *args: Any) -> None:
        read.append(type(self))
        first(self, *args)

    monkeypatch.setattr(stock, "__init__", counted)
    load_text_model(str(path))
    assert read.count(PlainReader) == 1
    assert stock not in read
    assert gguf.GGUFReader is stock


def test_a_file_that_has_changed_is_read_again(tmp_path: Path) -> None:
    path, _ = gguf_model.write(tmp_path)
    with read_once(), read_once():
        reader = gguf.GGUFReader(path)
        assert gguf.GGUFReader(os.fspath(path)) is reader
        os.utime(path, ns=(0, 0))
        assert gguf.GGUFReader(path) is not reader
        assert gguf.GGUFReader(path, "c") is not gguf.GGUFReader(path)
    assert gguf.GGUFReader(path) is not gguf.GGUFReader(path)
