"""What types of tensors mean: names, bytes of a row, and the format in ktk's words.

The gguf package knows ggml's types, and `ktk.ik_types` those that ik_llama.cpp adds to them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ktk import ik_types
from ktk._core import Format
from ktk.checkpoint.gguf.header import TensorInfo
from ktk.errors import CheckpointError
from ktk.formats import FLOATS


@dataclass(frozen=True)
class _Type:
    """Rows are `prefix` bytes and blocks of so many columns in so many bytes."""

    name: str
    columns: int
    nbytes: int
    prefix: int = 0


@functools.cache
def _known(number: int) -> _Type | None:
    if ours := ik_types.NUMBERS.get(number):
        return _Type(ours.name.upper(), ours.columns, ours.file_nbytes, ours.row_prefix)
    try:
        kind = GGMLQuantizationType(number)
        columns, nbytes = GGML_QUANT_SIZES[kind]
    except (KeyError, ValueError):
        return None
    return _Type(kind.name, columns, nbytes)


def type_name(info: TensorInfo) -> str:
    """Return the name of a tensor's type."""
    return _type(info).name


def format_of(info: TensorInfo) -> Format:
    """Return the format of a tensor's elements."""
    name = type_name(info).lower()
    return Format(name if name in FLOATS else f"ggml:{info.type}")


def is_known(info: TensorInfo) -> bool:
    """Whether a tensor has a type that ktk knows, and whole blocks of it."""
    kind = _known(info.type)
    return kind is not None and bool(info.shape) and info.shape[-1] % kind.columns == 0


def row_nbytes(info: TensorInfo) -> int:
    """Return the bytes of a row in the file."""
    kind = _type(info)
    if not info.shape or info.shape[-1] % kind.columns:
        raise CheckpointError(
            f"{info} has the shape {list(info.shape)}, whose rows are not whole blocks of "
            f"{kind.name} ({kind.columns} elements)"
        )
    return kind.prefix + info.shape[-1] // kind.columns * kind.nbytes


def row_scale(info: TensorInfo) -> tuple[str, int]:
    """Return the element and the bytes of the scale in front of a row; 0 bytes: there is none."""
    ours = ik_types.NUMBERS.get(info.type)
    if ours is None or ours.row_prefix == 0:
        return "", 0
    return "f16" if ours.d == "<f2" else "f32", ours.d_nbytes


def as_blocks(info: TensorInfo, rows: np.ndarray) -> np.ndarray:
    """Turn rows as the file has them into blocks of the tensor's format, and nothing else."""
    ours = ik_types.NUMBERS.get(info.type)
    return ours.blocks_of(rows) if ours else rows


def has_blocks(info: TensorInfo) -> bool:
    """Whether rows in the file are blocks of the tensor's format already."""
    return info.type not in ik_types.NUMBERS


def _type(info: TensorInfo) -> _Type:
    kind = _known(info.type)
    if kind is None:
        raise CheckpointError(
            f"{info} has ggml type {info.type}, which gguf {version('gguf')} does not know, and "
            "ktk neither"
        )
    return kind
