"""What ggml's types mean: names, bytes of a row, and the format in ktk's words."""

from __future__ import annotations

import functools
from importlib.metadata import version

import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ktk._core import Format
from ktk.checkpoint.gguf.header import TensorInfo
from ktk.errors import CheckpointError

#: Types whose elements are values already, by their names in ktk.
FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def _known(number: int) -> GGMLQuantizationType | None:
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        return None
    return kind if kind in GGML_QUANT_SIZES else None


def type_name(info: TensorInfo) -> str:
    """Return the name of a tensor's type."""
    return _type(info).name


def format_of(info: TensorInfo) -> Format:
    """Return the format of a tensor's elements."""
    name = type_name(info).lower()
    return Format(name if name in FLOATS else f"ggml:{info.type}")


def is_known(info: TensorInfo) -> bool:
    """Whether a tensor has a type that gguf knows, and whole blocks of it."""
    kind = _known(info.type)
    return kind is not None and bool(info.shape) and info.shape[-1] % GGML_QUANT_SIZES[kind][0] == 0


def row_nbytes(info: TensorInfo) -> int:
    """Return the bytes of a row."""
    kind = _type(info)
    block, nbytes = GGML_QUANT_SIZES[kind]
    if not info.shape or info.shape[-1] % block:
        raise CheckpointError(
            f"{info} has the shape {list(info.shape)}, whose rows are not whole blocks of "
            f"{kind.name} ({block} elements)"
        )
    return info.shape[-1] // block * nbytes


def _type(info: TensorInfo) -> GGMLQuantizationType:
    kind = _known(info.type)
    if kind is None:
        raise CheckpointError(
            f"{info} has ggml type {info.type}, which gguf {version('gguf')} does not know"
        )
    return kind
