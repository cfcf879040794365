"""What ranks send each other: a header of fixed size, and arrays behind it.

0       4      5       6   8       12      16       24     32      36  40       48
| magic | kind | dtype | k | layer | round | tokens | rows | width | 0 | nbytes |
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

_STRUCT = struct.Struct("<IBBHIIQQIIQ")
_MAGIC = 0x316B746B  # "ktk1"
HEADER = _STRUCT.size
#: Types of tokens; their positions are what headers say.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Kind(IntEnum):
    """What follows a header."""

    TOKENS = 1  # rows of hidden, of ids as int32, of weights as f32
    PARTIAL = 2  # rows of sums, f32
    RESULT = 3  # rows of the output
    ERROR = 4  # a sentence, in UTF-8


@dataclass(slots=True)
class Header:
    """What a frame is.

    Attributes
    ----------
    kind
        What follows.
    layer, round
        Which layer, numbered as they were made, and which part of a call of it.
    tokens
        Of the sender, in the whole call.
    rows
        That follow.
    k, dtype, width
        Of all tokens: experts of each, position in `DTYPES`, hidden_size.
    nbytes
        That follow the header.
    """

    kind: int
    layer: int
    round: int = 0
    tokens: int = 0
    rows: int = 0
    k: int = 0
    dtype: int = 0
    width: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes."""
        return _STRUCT.pack(
            *(_MAGIC, self.kind, self.dtype, self.k, self.layer, self.round),
            *(self.tokens, self.rows, self.width, 0, self.nbytes),
        )

    @classmethod
    def unpack(cls, data: bytes | bytearray) -> Header:
        """Read a header; ValueError for other bytes."""
        magic, kind, dtype, k, layer, round_, tokens, rows, width, _, nbytes = _STRUCT.unpack_from(
            data
        )
        if magic != _MAGIC:
            raise ValueError("not a header")
        return cls(kind, layer, round_, tokens, rows, k, dtype, width, nbytes)


def view(array: Any) -> memoryview:
    """Return the bytes of a contiguous array, or tensor in CPU memory; no copy."""
    if isinstance(array, torch.Tensor):
        array = array.view(torch.uint8).numpy()
    return memoryview(array).cast("B") if array.size else memoryview(b"")
