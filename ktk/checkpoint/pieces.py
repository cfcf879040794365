"""What one expert has in each tensor of a checkpoint, byte by byte, and whether that is finite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

# Of an unsigned integer that holds an element: the bits without the sign, and the least of them
# that is no finite number.
_WORDS: dict[str, tuple[Any, int, int]] = {
    "f32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "f16": (np.uint16, 0x7FFF, 0x7C00),
    "bf16": (np.uint16, 0x7FFF, 0x7F80),
    "e4m3": (np.uint8, 0x7F, 0x7F),
    "e5m2": (np.uint8, 0x7F, 0x7C),
    "ue8m0": (np.uint8, 0xFF, 0xFF),
}
# Elements that are looked at together: what that takes stays in the cache.
_CHUNK = 1 << 18


@dataclass(frozen=True)
class Piece:
    """An expert's part of a tensor.

    Attributes
    ----------
    name
        Of the tensor, as its file has it.
    file
        Which that is.
    element
        In ktk's words: f32, bf16, e4m3, ue8m0, or the name of a ggml type such as q4_k; empty for
        codes that mean something whatever they are.
    data
        uint8 [bytes].
    written
        The checksum it was written with, where the file says one.
    """

    name: str
    file: Path
    element: str
    data: np.ndarray
    written: int | None = None

    def faults(self) -> Iterator[str]:
        """Say what is wrong with it; each ends a sentence."""
        found = xxhash.xxh3_64_intdigest(self.data.data)
        if self.written not in (None, found):
            # Whatever else is wrong follows from that.
            yield f"it has the checksum {found:016x}, and was written with {self.written:016x}"
        elif count := self.not_finite():
            plain = self.element in _WORDS
            what = "infinite or not a number" if plain else "blocks whose scales are not finite"
            yield f"it holds {count} {'elements that are ' if plain else ''}{what}"

    def not_finite(self) -> int:
        """Count the elements, or blocks of ggml, whose floats or scales are not finite."""
        if self.element in _WORDS:
            word, bits, least = _WORDS[self.element]
            values = self.data.view(word)
            chunks = (values[at : at + _CHUNK] for at in range(0, values.size, _CHUNK))
            return sum(int(np.count_nonzero((chunk & bits) >= least)) for chunk in chunks)
        if self.element:
            from ktk.ggml import not_finite

            return not_finite(self.data, self.element)
        return 0


def flat(array: Any) -> np.ndarray:
    """Return the bytes of a tensor or an array, uint8 [bytes]."""
    if not isinstance(array, np.ndarray):
        import torch

        array = array.contiguous().reshape(-1).view(torch.uint8).numpy()
    found: np.ndarray = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return found


def digest(pieces: Iterator[Piece]) -> int:
    """Return a checksum over names and bytes."""
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(f"{piece.name}\0{piece.element}\0{piece.data.size}\0".encode())
        state.update(piece.data.data)
    found: int = state.intdigest()
    return found
