"""Keeps dense layers and embeddings of a GGUF file in the blocks that they are stored in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ktk.backend import Backend
from ktk.checkpoint.gguf.blocks import as_blocks, format_of
from ktk.checkpoint.gguf.header import TensorInfo
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.dtypes import FLOAT_DTYPES
from ktk.errors import BackendError, CheckpointError
from ktk.expert import Matrix
from ktk.names import BLOCKS
from ktk.registry import load_backend
from ktk.transformers.config import KtkConfig
from ktk.transformers.dense import KtkEmbedding
from ktk.transformers.linears import (
    head_of,
    linears_of,
    packed_matrix,
    put_head,
    put_linear,
    takes,
    tied_embedding,
)


@dataclass(frozen=True)
class Kept:
    """A matrix that is to be packed as it is in the file.

    Attributes
    ----------
    tensor, module
        Its names in the file and in the model.
    backend
        What it is packed for.
    order
        The rows of the file in the order of the model; None if that is the same.
    """

    tensor: str
    module: str
    backend: Backend
    order: torch.Tensor | None


def plan_blocks(
    tensors: TensorSet,
    model: Any,
    names: Mapping[str, str],
    processor: Any,
    config: KtkConfig,
    in_blocks: bool = True,
) -> dict[str, Kept]:
    """Return which matrices of a file are to be packed, by their names in the file.

    Parameters
    ----------
    tensors
        The file.
    model
        Of transformers, without weights.
    names
        What tensors of the file are in the model.
    processor
        Of transformers; what it does to a matrix is found by asking.
    config
        Names backends.
    in_blocks
        Whether what takes blocks as they are takes them where `config` names no backend.
    """
    wanted: dict[str, str | None] = dict.fromkeys(linears_of(model), config.linears)
    if (found := head_of(model)) is not None:
        wanted[found[0]] = config.head
        if (tied := tied_embedding(model)) is not None:
            wanted[tied[0]] = config.head
    for name, module in model.named_modules():
        if type(module) is nn.Embedding and module.max_norm is None:
            wanted.setdefault(name, None)
    kept = {}
    for tensor, target in names.items():
        module, _, suffix = target.rpartition(".")
        if suffix != "weight" or module not in wanted or tensor not in tensors:
            continue
        if wanted[module] is None and not in_blocks:
            continue
        backend = _backend(tensors.info(tensor), wanted[module])
        if backend is None:
            continue
        try:
            order = _order(processor, tensor, tensors.info(tensor).shape, names)
        except _OtherValuesError:
            continue
        kept[tensor] = Kept(tensor, module, backend, order)
    return kept


def load_blocks(tensors: TensorSet, model: Any, kept: Kept, bias: torch.Tensor | None) -> None:
    """Read a matrix, pack it, and put it into the model."""
    tensors.check(kept.tensor)
    info = tensors.info(kept.tensor)
    old = model.get_submodule(kept.module)
    if tuple(info.shape) != tuple(old.weight.shape):
        raise CheckpointError(
            f"{tensors.path}: {kept.tensor} has shape {list(info.shape)}, and the metadata want "
            f"{list(old.weight.shape)}: are some of them missing, or wrong?"
        )
    fmt = format_of(info)
    data = torch.from_numpy(as_blocks(info, tensors.rows(kept.tensor, 0, info.shape[0])))
    if kept.order is not None:
        data = data[kept.order]
    if fmt.element in FLOAT_DTYPES:
        data = data.view(FLOAT_DTYPES[fmt.element])
    head, tied = head_of(model), tied_embedding(model)
    # A tied weight is in the file as the embedding.
    is_head = head is not None and kept.module in (head[0], tied and tied[0])
    name = head[0] if head is not None and is_head else kept.module
    layer = packed_matrix(kept.backend, Matrix(fmt, data, bias=bias), name)
    if is_head:
        put_head(model, name, layer)
    elif isinstance(old, nn.Linear):
        put_linear(model, name, layer)
    else:
        model.set_submodule(name, KtkEmbedding(layer, old.weight.dtype, old.padding_idx))


class _OtherValuesError(Exception):
    """A processor of transformers changes more than the order of rows."""


def _backend(info: TensorInfo, name: str | None) -> Backend | None:
    """Return what is to pack a matrix; None if it is to be decoded as all other tensors."""
    if len(info.shape) != 2:
        return None
    if name is not None:
        return load_backend(name)
    fmt = format_of(info)
    if fmt.element in FLOAT_DTYPES:
        return None
    for known in BLOCKS:
        try:
            backend = load_backend(known)
        except BackendError:
            continue
        if takes(backend, fmt, (info.shape[0], info.shape[1])):
            return backend
    return None


def _order(
    processor: Any, name: str, shape: tuple[int, ...], names: Mapping[str, str]
) -> torch.Tensor | None:
    """Ask a processor which row of a file each row of the model is; None if all stay."""
    if type(processor).process is _identity():
        return None
    rows, columns = (
        np.broadcast_to(np.arange(extent, dtype=np.float32).reshape(one), shape)
        for extent, one in zip(shape, ((-1, 1), (1, -1)), strict=True)
    )
    answers = []
    for probe in (rows, columns):
        try:
            result = processor.process(
                probe, name, tensor_key_mapping=dict(names), parsed_parameters={"tensors": {}}
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise _OtherValuesError from None
        if result.name != name or result.weights.shape != shape:
            raise _OtherValuesError
        answers.append(result.weights)
    if answers[0] is rows and answers[1] is columns:
        return None
    order = answers[0][:, 0].astype(np.int64)
    once = np.array_equal(np.sort(order), np.arange(shape[0]))
    if not once or (answers[0] != order[:, None]).any() or (answers[1] != columns).any():
        raise _OtherValuesError
    return torch.from_numpy(order)


def _identity() -> Any:
    """Return the method of processors that leave all tensors as they are."""
    from transformers import modeling_gguf_pytorch_utils as stock

    return stock.TensorProcessor.process
