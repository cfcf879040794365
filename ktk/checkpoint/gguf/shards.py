"""Joins the files of a split model, given any one of them or their folder."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import Keys

from ktk.checkpoint.gguf.blocks import is_known, row_nbytes
from ktk.checkpoint.gguf.header import GgufFile, TensorInfo, open_file
from ktk.errors import CheckpointError
from ktk.unread import Unread

# How llama.cpp's gguf-split names them, from 1.
_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT = Keys.Split.LLM_KV_SPLIT_COUNT
_NUMBER = Keys.Split.LLM_KV_SPLIT_NO
_TENSORS = Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT


class TensorSet:
    """The metadata and tensors of a model, whatever files they are in."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = _complete(_named(path) if path.is_dir() else open_file(path))
        self.fields: dict[str, Any] = {}
        self._files = {file.path: file for file in files}
        self._tensors: dict[str, TensorInfo] = {}
        for file in files:
            _check_overlaps(file)
            # The first file has all of it, the others may repeat some.
            self.fields = {**file.fields, **self.fields}
            for name, info in file.tensors.items():
                if name in self._tensors:
                    raise CheckpointError(
                        f"tensor {name} is in {self._tensors[name].file} and again in {file.path}"
                    )
                self._tensors[name] = info

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def paths(self) -> list[Path]:
        """Return the files."""
        return sorted(self._files)

    def info(self, name: str) -> TensorInfo:
        """Return shape, type and place of a tensor."""
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path} has no tensor {name}") from None

    def check(self, name: str) -> None:
        """Refuse a tensor of an unknown type, of incomplete blocks, or behind the file's end."""
        info = self.info(name)
        end = info.begin + math.prod(info.shape[:-1]) * row_nbytes(info)
        size = self._files[info.file].file.size
        if end > size:
            raise CheckpointError(
                f"{info.file} is truncated: tensor {name} ends at byte {end}, the file at {size}. "
                "Download it again"
            )

    def rows(self, name: str, begin: int, count: int, later: Unread | None = None) -> np.ndarray:
        """Read rows of a tensor, uint8 [count, bytes of a row].

        Leading dimensions count as rows: expert e of [E, N, K] begins at row e * N. `later`: see
        `File.read`.
        """
        info = self.info(name)
        nbytes = row_nbytes(info)
        file = self._files[info.file].file
        return file.read(info.begin + begin * nbytes, count * nbytes, later).reshape(count, nbytes)

    def close(self) -> None:
        """Close the files; reading opens them again."""
        for found in self._files.values():
            found.file.close()


def _check_overlaps(file: GgufFile) -> None:
    """Refuse tensors that share bytes. Of types that gguf does not know nobody can tell."""
    known = [info for info in file.tensors.values() if is_known(info)]
    ordered = sorted(known, key=lambda info: info.begin)
    for info, following in itertools.pairwise(ordered):
        end = info.begin + math.prod(info.shape[:-1]) * row_nbytes(info)
        if end > following.begin:
            raise CheckpointError(
                f"{file.path} is damaged: tensor {info.name} ends at byte {end}, behind the "
                f"beginning of tensor {following.name} at {following.begin}"
            )


def _named(folder: Path) -> GgufFile:
    """Return a file of the only model in a folder; image encoders and adapters are none."""
    models: dict[str, GgufFile] = {}
    for path in sorted(folder.glob("*.gguf")):
        match = _SHARD.fullmatch(path.name)
        name = match["stem"] if match else path.stem
        if name not in models:
            models[name] = open_file(path)
    models = {name: file for name, file in models.items() if _is_model(file)}
    if len(models) != 1:
        found = ", ".join(models) or "none"
        raise CheckpointError(
            f"{folder} should hold one model in GGUF files, it holds {found}"
            + (": give one of them" if models else "")
        )
    return next(iter(models.values()))


def _is_model(file: GgufFile) -> bool:
    kind, name = (
        str(file.fields.get(key, "model")) for key in (Keys.General.TYPE, Keys.General.ARCHITECTURE)
    )
    return kind == "model" and name != "clip"


def _complete(one: GgufFile) -> list[GgufFile]:
    """Return all files of a model in order, and check that they belong together."""
    count = one.fields.get(_COUNT, 1)
    if not isinstance(count, int):
        raise CheckpointError(f"{one.path}: {_COUNT} is {count!r}, expected a number")
    if count <= 1:
        return [one]
    match = _SHARD.fullmatch(one.path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{one.path} is one of {count} files by its {_COUNT}, so its name should end in "
            f"-0000N-of-{count:05d}.gguf"
        )
    files = [
        _shard(one, one.path.with_name(f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"))
        for number in range(1, count + 1)
    ]
    for number, file in enumerate(files):
        for key, expected in ((_COUNT, count), (_NUMBER, number)):
            value = file.fields.get(key)
            if not isinstance(value, int) or value != expected:
                raise CheckpointError(f"{file.path}: {key} is {value}, its name means {expected}")
    total = one.fields.get(_TENSORS)
    found = sum(len(file.tensors) for file in files)
    if total is not None and (not isinstance(total, int) or found != total):
        raise CheckpointError(
            f"{files[0].path} and the {count - 1} files after it hold {found} tensors, but "
            f"{_TENSORS} is {total}"
        )
    return files


def _shard(one: GgufFile, path: Path) -> GgufFile:
    if path == one.path:
        return one
    if not path.exists():
        raise CheckpointError(f"{path} is missing, though {one.path.name} is here: both are needed")
    return open_file(path)
