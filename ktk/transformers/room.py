"""Keys and values of a cache with room behind them, where transformers copies all for each token.

Nobody can tell: what a cache holds are views of the memory that is filled. A row is written once,
behind all that any view shows. A cache that was cut, copied or reordered holds other tensors, which
are copied to memory of their own with the next token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# Of a view of keys: where it comes from.
_SLOT = "ktk_room"
# Tokens that there is room for, at least, and the part of those that are there.
_LEAST, _PART = 64, 4


@dataclass(eq=False)
class Room:
    """Memory of the keys and values of a layer.

    Attributes
    ----------
    keys, values : tensor [1, heads, room, depth]
    filled : int
        Rows that are written.
    shown : tensor [1, heads, filled, depth]
        The view of values that goes with the newest view of keys.
    """

    keys: torch.Tensor
    values: torch.Tensor
    filled: int
    shown: torch.Tensor

    def show(self, layer: Any) -> None:
        """Let a layer of a cache hold one more row, which was written."""
        self.filled += 1
        layer.keys = self.keys.narrow(2, 0, self.filled)
        layer.values = self.shown = self.values.narrow(2, 0, self.filled)
        setattr(layer.keys, _SLOT, self)


def room_of(layer: Any) -> Room:
    """Return memory with what a layer of a cache holds and room for another row.

    Parameters
    ----------
    layer
        Of transformers' `DynamicCache`, with keys and values [1, heads, tokens, depth] in CPU
        memory.
    """
    keys, values = layer.keys, layer.values
    tokens = keys.shape[2]
    room: Room | None = getattr(keys, _SLOT, None)
    if room is not None and room.filled == tokens < room.keys.shape[2] and room.shown is values:
        return room
    rows = tokens + max(_LEAST, tokens // _PART)
    memory = [one.new_empty((*one.shape[:2], rows, one.shape[3])) for one in (keys, values)]
    for new, old in zip(memory, (keys, values), strict=True):
        new[:, :, :tokens] = old
    return Room(memory[0], memory[1], tokens, values)
