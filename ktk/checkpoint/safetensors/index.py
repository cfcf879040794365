"""Which file of a checkpoint holds which tensor, and access to them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import torch

from ktk.checkpoint.entries import EntryError, printable, table, text
from ktk.checkpoint.files import MissingFile, read_json
from ktk.checkpoint.safetensors.tensor_file import TensorFile, TensorInfo
from ktk.closing import Closing
from ktk.errors import CheckpointError
from ktk.unread import Unread

INDEX = "model.safetensors.index.json"


class TensorIndex(Closing):
    """The tensors of a folder of safetensors files.

    The header of a file is read when the first of its tensors is asked for. Then a tensor that the
    folder's index does not list, of a module that it lists others of, is an error: other programs
    read all that is in a file, and what belongs to a matrix, its bias, would be missed without a
    word. Of a tensor in several files the index says which is meant.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[Path, TensorFile] = {}
        self._has_index = (folder / INDEX).exists()
        self._files = self._listed() if self._has_index else self._scanned()

    @cached_property
    def _modules(self) -> set[str]:
        return {name.rpartition(".")[0] for name in self._files}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._files)

    def paths(self) -> list[Path]:
        """Return the files that hold the tensors."""
        return sorted(set(self._files.values()))

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        try:
            return self._files[name]
        except KeyError:
            raise CheckpointError(f"{self.folder} has no tensor {name}") from None

    def where(self, name: str) -> str:
        """Name a tensor and its file, for messages."""
        return f"tensor {name} in {self.file(name)}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor without reading it."""
        return self._info(name).shape

    def dtype(self, name: str) -> str:
        """Return the element type of a tensor, as safetensors spells it, without reading it."""
        return self._info(name).dtype

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor without reading it."""
        return self._info(name).nbytes

    def tensor(
        self,
        name: str,
        expert: int | None = None,
        joined: int | None = None,
        later: Unread | None = None,
    ) -> torch.Tensor:
        """Read a tensor, or one expert of a fused one; of as many as are `joined` in one axis.

        `later`: see `File.read`.
        """
        return self._holder(name).read(name, expert, joined, later)

    def read_bytes(self, name: str, begin: int, nbytes: int) -> torch.Tensor:
        """Read bytes of a tensor, counted from its first, uint8 [nbytes]."""
        return self._holder(name).read_bytes(name, begin, nbytes)

    def in_order(self) -> Iterator[str]:
        """Yield the names of all tensors as they lie in the files."""
        for path in self.paths():
            yield from (name for name in self._open(path).tensors if self._files.get(name) == path)

    def stand_in(
        self, name: str, expert: int | None = None, joined: int | None = None
    ) -> torch.Tensor:
        """Return the like of `tensor` without values, on the device meta, without reading it."""
        return self._holder(name).stand_in(name, expert, joined)

    def look_beside(self, names: Iterable[str]) -> None:
        """Look for tensors that the index does not list in the files that are to hold some.

        A file that is missing is left to whoever reads it.
        """
        if self._has_index:
            for path in {self._files[name]: None for name in names}:
                if path.exists():
                    self._open(path)

    def look_at(self, path: Path) -> None:
        """Read the header of a file, if that was not done."""
        self._open(path)

    def close(self) -> None:
        """Close the files; what is asked for afterwards opens its file again."""
        # Another thread may open one meanwhile.
        for opened in list(self._opened.values()):
            opened.close()

    def _info(self, name: str) -> TensorInfo:
        return self._holder(name).tensors[name]

    def _holder(self, name: str) -> TensorFile:
        """Return the file of a tensor, which has it."""
        path = self.file(name)
        opened = self._open(path)
        if name not in opened.tensors:
            raise CheckpointError(f"{path} lacks the tensor {name}, which {INDEX} says it holds")
        return opened

    def _open(self, path: Path) -> TensorFile:
        opened = self._opened.get(path)
        if opened is None:
            try:
                opened = TensorFile(path)
            except MissingFile as error:
                listed = os.path.lexists(self.folder / INDEX)
                why = f"though {INDEX} names it" if listed else "though a link leads there"
                raise CheckpointError(f"{error}, {why}: an incomplete download?") from None
            except EntryError as error:
                raise CheckpointError(
                    f"{path} is damaged or truncated: {error}. Download it again"
                ) from error
            if self._has_index:
                self._check_listed(opened)
            self._opened[path] = opened
        return opened

    def _check_listed(self, opened: TensorFile) -> None:
        left = [
            name
            for name in opened.tensors
            if name not in self._files and name.rpartition(".")[0] in self._modules
        ]
        if left:
            more = f" and {len(left) - 1} more" if left[1:] else ""
            raise CheckpointError(
                f"{opened.path} holds the tensor {left[0]}{more}, which {INDEX} does not list: the "
                "index is of other files. Download it again, or remove it, and ktk reads all that "
                "the files hold"
            )

    def _listed(self) -> dict[str, Path]:
        path = self.folder / INDEX
        document = read_json(path)
        try:
            listed = table("weight_map", document.get("weight_map"))
            files = {name: text(f"the file of {name}", file) for name, file in listed.items()}
        except EntryError as error:
            raise CheckpointError(f"{path}: {error}") from error
        first = {file: name for name, file in reversed(files.items())}
        places = {file: self._inside(path, name, file) for file, name in first.items()}
        return {name: places[file] for name, file in files.items()}

    def _inside(self, index: Path, name: str, file: str) -> Path:
        """Refuse files elsewhere, which a download must not name. Links to such are the user's."""
        parts = PurePosixPath(file).parts
        if not parts or parts[0] == "/" or ".." in parts or not file.isprintable():
            raise CheckpointError(
                f"{index} says that {printable(name)} is in {file!r}, expected a file in the same "
                "folder"
            )
        return self.folder / file

    def _scanned(self) -> dict[str, Path]:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} holds no safetensors files")
        found: dict[str, Path] = {}
        for path in paths:
            for name in self._open(path).tensors:
                if name in found:
                    raise CheckpointError(f"tensor {name} is in {found[name]} and again in {path}")
                found[name] = path
        return found
