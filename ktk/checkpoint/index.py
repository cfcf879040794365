"""Which file of a checkpoint holds which tensor, and lazy access to them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ktk.checkpoint.config import read_json
from ktk.errors import CheckpointError

INDEX = "model.safetensors.index.json"


class TensorIndex:
    """The tensors of a folder of safetensors files.

    Files are mapped when the first of their tensors is asked for, and tensors are views of the
    mapping: nothing is read before it is used. `close` gives the mappings back.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mapped: dict[Path, Any] = {}
        self._files = self._listed() if (folder / INDEX).exists() else self._scanned()

    def __enter__(self) -> TensorIndex:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the element type of a tensor, as safetensors spells it, without reading it."""
        return str(self._slice(name).get_dtype())

    def nbytes(self, name: str) -> int:
        """Return the bytes of a tensor without reading it."""
        stored = self._slice(name)
        shape: list[int] = stored.get_shape()
        return math.prod(shape) * _bits(stored.get_dtype()) // 8

    def tensor(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Return a tensor, or one expert of a fused one, as a view of the mapped file."""
        stored = self._slice(name)
        tensor: torch.Tensor = stored[...] if expert is None else stored[expert]
        return tensor

    def close(self) -> None:
        """Forget the mapped files; tensors that are still in use keep theirs.

        What is asked for afterwards maps its file again.
        """
        self._mapped.clear()

    def _slice(self, name: str) -> Any:
        path = self.file(name)
        try:
            return self._open(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} lacks the tensor {name}, which {INDEX} says it holds ({error})"
            ) from error

    def _open(self, path: Path) -> Any:
        # Another thread may let go of all files at any time.
        mapped = self._mapped.get(path)
        if mapped is None:
            try:
                mapped = self._mapped[path] = safe_open(path, framework="pt")
            except FileNotFoundError:
                raise CheckpointError(
                    f"{path} is missing, though {INDEX} names it: an incomplete download?"
                ) from None
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path} is damaged or truncated: {error}. Download it again"
                ) from error
        return mapped

    def _listed(self) -> dict[str, Path]:
        path = self.folder / INDEX
        files = read_json(path).get("weight_map")
        if not isinstance(files, dict):
            raise CheckpointError(f"{path} has no weight_map")
        return {str(name): self.folder / str(file) for name, file in files.items()}

    def _scanned(self) -> dict[str, Path]:
        paths = sorted(self.folder.glob("*.safetensors"))
        if not paths:
            raise CheckpointError(f"{self.folder} holds no safetensors files")
        found: dict[str, Path] = {}
        for path in paths:
            for name in self._open(path).keys():  # noqa: SIM118 - not a mapping
                if name in found:
                    raise CheckpointError(f"tensor {name} is in {found[name]} and again in {path}")
                found[name] = path
        return found


def _bits(dtype: str) -> int:
    """Return the bits of an element: the number in its name, as in F8_E4M3."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else 8
