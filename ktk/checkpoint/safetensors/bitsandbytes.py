"""Decodes what bitsandbytes stores: 4 bits (nf4, fp4) by a table of values, and LLM.int8.

4 bits: the matrix is one row of blocks, 64 values each unless ``quant_state`` says otherwise, the
first of two codes in the high half of a byte.

    weight       | c0 c1 | c2 c3 | ... | c62 c63 | next block ...
    absmax       | a0                            | a1 ...           f32, or nested
    quant_map    | v0 v1 ... v15 |                                  f32

A value is ``quant_map[code] * absmax``. Nested ("double quantisation"): absmax is a byte itself,
``nested_quant_map[byte] * nested_absmax + nested_offset``, with blocks of 256. As published in
Dettmers et al., "QLoRA", 2023, sections 3 and B; names and order are those of the package's own
files.

LLM.int8: int8 by rows, a value is ``code * SCB / 127``. Dettmers et al., "LLM.int8()", 2022,
section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktk._core import Format
from ktk.checkpoint.entries import EntryError, integer, integers, number, parse_object
from ktk.checkpoint.safetensors.scheme import Layout, StorageError, Tensors, as_bytes, decoded
from ktk.expert import Matrix

_INT8_LEVELS = 127
# What weight_format says where int8 is not laid out by rows, for tensor cores of one generation.
_TILED = {1: "col32", 2: "col_turing", 3: "col_ampere"}


def int8(t: Tensors, layout: Layout) -> Matrix:
    """Decode LLM.int8, which becomes int8 with a scale for each row."""
    kind = int(t["layout"]) if "layout" in t else 0
    if kind:
        raise StorageError(
            f"is laid out as {_TILED.get(kind, kind)}, for one kind of GPU; load the model with "
            "bitsandbytes 0.45 or newer and save it again"
        )
    scale = t["scale"].float().reshape(-1, 1) / _INT8_LEVELS
    return Matrix(Format("i8", "f32", "none", 1, 0), t["data"], scale)


@dataclass(frozen=True)
class _State:
    """What is no tensor, and is kept as JSON in one: ``quant_state``."""

    shape: tuple[int, ...]
    block: int
    nested_block: int
    nested_offset: float

    @classmethod
    def read(cls, stored: torch.Tensor) -> _State:
        try:
            entries = parse_object(stored.numpy().tobytes())
            return cls(
                integers("shape", entries.get("shape"), 2),
                integer("blocksize", entries.get("blocksize"), least=1),
                integer("nested_blocksize", entries.get("nested_blocksize", 1), least=1),
                number("nested_offset", entries.get("nested_offset", 0)),
            )
        except EntryError as error:
            raise StorageError(f"has a quant_state that ktk cannot read: {error}") from None


def sizes(state: torch.Tensor) -> tuple[int, ...]:
    """Return rows and columns of a matrix, by its `quant_state`."""
    return _State.read(state).shape


def four_bits(t: Tensors, layout: Layout) -> Matrix:
    """Decode nf4 and fp4; `quant_map` says which values their codes stand for."""
    state, (n, k) = _State.read(t["state"]), (layout.n, layout.k)
    if state.shape != (n, k):
        raise StorageError(f"is a matrix of {list(state.shape)}, but config.json means {[n, k]}")

    def values() -> torch.Tensor:
        codes = as_bytes(t["data"].reshape(-1))
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).flatten()
        if codes.numel() != n * k:
            raise StorageError(f"has {codes.numel()} codes, and is a matrix of {[n, k]}")
        return _scaled(t["map"][codes.int()], _absmax(t, state), state.block).reshape(n, k)

    return decoded(layout, t["data"], values)


def _absmax(t: Tensors, state: _State) -> torch.Tensor:
    """Return the largest magnitudes of blocks, f32."""
    found = {"nested_absmax", "nested_map"} & t.keys()
    if len(found) != (0 if t["absmax"].is_floating_point() else 2):
        raise StorageError("has an absmax that is nested in part, as if of two files")
    if not found:
        return t["absmax"]
    values = t["nested_map"][t["absmax"].int()]
    return _scaled(values, t["nested_absmax"], state.nested_block) + state.nested_offset


def _scaled(values: torch.Tensor, scale: torch.Tensor, block: int) -> torch.Tensor:
    """Multiply each block of values with its scale; the last may be shorter."""
    if scale.numel() != -(-values.numel() // block):
        raise StorageError(
            f"has {scale.numel()} scales for {values.numel()} values in blocks of {block}"
        )
    return values * scale.repeat_interleave(block)[: values.numel()]
