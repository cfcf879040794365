"""Finds the dense layers of a model, and packs those that are in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ktk._core import Format
from ktk.backend import Backend
from ktk.dtypes import FLOAT_NAMES
from ktk.expert import Matrix
from ktk.formats import FLOATS
from ktk.hosts.linear import OpLinear
from ktk.linear import Linear
from ktk.names import PREFERRED
from ktk.quantize import dequantize, quantize
from ktk.registry import load_backend
from ktk.transformers.decoding import speed_up
from ktk.transformers.dense import KtkEmbedding, KtkLinear
from ktk.transformers.layout import is_experts

#: Layers that have fewer rows or columns take longer to be called than to be read.
LEAST = 64
_DTYPES = tuple(FLOAT_NAMES)
# What modules that choose experts are called, where shapes do not tell.
_ROUTERS = ("gate", "router")


def linears_of(model: Any) -> dict[str, nn.Linear]:
    """Return the dense layers of a model by name, but for what chooses experts and its head."""
    head = head_of(model)
    routers = set(_routers(model))
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and min(module.out_features, module.in_features) >= LEAST
        and (head is None or module is not head[1])
        and name not in routers
    }


def head_of(model: Any) -> tuple[str, nn.Linear] | None:
    """Return the output head of a model and its name; None if it has none, or an unusual one."""
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head) is not nn.Linear:
        return None
    return next(((name, head) for name, one in model.named_modules() if one is head), None)


def pack_linears(
    model: Any,
    linears: str | Backend | None = None,
    head: str | Backend | None = None,
    *,
    dtypes: Collection[torch.dtype] = _DTYPES,
) -> None:
    """Pack dense layers that are in CPU memory, one after the other, and free their tensors.

    Parameters
    ----------
    model
        Of transformers.
    linears, head
        What computes dense layers, and the output head; None leaves them as they are. An embedding
        that is tied to the head is read from what is packed.
    dtypes
        Of weights that are packed; others stay.
    """
    if linears is not None:
        backend = _loaded(linears)
        for name in list(linears_of(model)):  # nothing here may keep a module that was replaced
            module = model.get_submodule(name)
            if _here(module, dtypes):
                put_linear(model, name, packed_from(backend, module, name))
    if head is not None and (found := head_of(model)) is not None:
        name, module = found
        if _here(module, dtypes):
            put_head(model, name, packed_from(_loaded(head), module, name))


def pack_bf16(model: Any, *, linears: bool = True, head: bool = True) -> None:
    """Pack dense layers, and the output head, that are in bf16, and keep each bit of them."""
    exact = PREFERRED["bf16"][0]
    pack_linears(
        model, exact if linears else None, exact if head else None, dtypes=[torch.bfloat16]
    )
    speed_up(model)


def packed_from(backend: Backend, module: nn.Linear, name: str) -> OpLinear:
    """Pack the weight and the bias of a module."""
    with torch.no_grad():
        bias = None if module.bias is None else module.bias.detach()
        return packed_matrix(backend, Matrix(None, module.weight.detach(), bias=bias), name)


def packed_matrix(backend: Backend, matrix: Matrix, name: str) -> OpLinear:
    """Pack a matrix, as it is stored if the backend takes that, and else by way of floats.

    Raises
    ------
    ValueError
        There is no way from what is given to what the backend stores, or a weight is not finite.
    """
    with torch.device("cpu"):  # models are made on others
        shape = _shape(matrix)
        linear = Linear(backend, shape[1], shape[0], bias=matrix.bias is not None)
        if matrix.format is not None and not takes(backend, matrix.format, shape):
            bias = matrix.bias
            matrix = Matrix(None, dequantize(matrix), bias=bias)
        try:
            linear.load(_taken(backend, matrix))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return OpLinear(linear, name)


def takes(backend: Backend, fmt: Format, shape: tuple[int, int]) -> bool:
    """Whether a backend takes a matrix in a format."""
    try:
        backend.core.stored_as(fmt, *shape)
    except ValueError:
        return False
    return True


def put_linear(
    model: Any, name: str, layer: OpLinear, dtype: torch.dtype | None = None
) -> KtkLinear:
    """Put a packed layer in the place of a module, which goes; `dtype` if it has no weight."""
    old = model.get_submodule(name)
    made = KtkLinear(layer, dtype or old.weight.dtype, old.bias)
    model.set_submodule(name, made.train(old.training))
    return made


def put_head(model: Any, name: str, layer: OpLinear, dtype: torch.dtype | None = None) -> None:
    """Put a packed head in its place, and read an embedding that is tied to it from there."""
    tied = tied_embedding(model)
    put_linear(model, name, layer, dtype)
    if tied is not None:
        where, old = tied
        # There are no two tensors any more that transformers could tie, now or when it is asked to
        # look again.
        model.all_tied_weights_keys.pop(f"{name}.weight", None)
        if isinstance(ties := getattr(model, "_tied_weights_keys", None), dict):
            model._tied_weights_keys = {
                target: source for target, source in ties.items() if target != f"{name}.weight"
            }
        made = KtkEmbedding(layer, old.weight.dtype, old.padding_idx)
        model.set_submodule(where, made.train(old.training))


def tied_embedding(model: Any) -> tuple[str, nn.Embedding] | None:
    """Return the embedding that has the tensor of the output head; None if it is another."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # Other classes do more than read rows.
    if (
        type(head) is not nn.Linear
        or type(embedding) is not nn.Embedding
        or embedding.max_norm is not None
    ):
        return None
    names = {one: name for name, one in model.named_modules()}
    # While a model is loaded they are two tensors yet, without values.
    target = f"{names.get(head)}.weight"
    to_be = (
        head.weight is not None and head.weight.is_meta and target in model.all_tied_weights_keys
    )
    if embedding.weight is not head.weight and not to_be:
        return None
    return names[embedding], embedding


def _routers(model: Any) -> Iterator[str]:
    """Yield the names of dense layers that choose experts."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        if is_experts(module):
            counts[name.rpartition(".")[0]] = module.num_experts
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        parents = name.split(".")
        if any(part in _ROUTERS for part in parents):
            yield name
        for end in range(len(parents)):
            if counts.get(".".join(parents[:end])) == module.out_features:
                yield name


def _here(module: nn.Linear, dtypes: Collection[torch.dtype]) -> bool:
    return module.weight.device.type == "cpu" and module.weight.dtype in dtypes


def _loaded(backend: str | Backend) -> Backend:
    return load_backend(backend) if isinstance(backend, str) else backend


def _shape(matrix: Matrix) -> tuple[int, int]:
    """Return rows and columns of a matrix, whose data may be values or bytes."""
    rows, items = matrix.data.shape
    if matrix.format is None or matrix.format.element in FLOATS:
        return rows, items
    columns, nbytes = matrix.format.block
    return rows, items // nbytes * columns


def _taken(backend: Backend, matrix: Matrix) -> Matrix:
    """Return floats, or the codes of them for a backend that takes codes only."""
    if matrix.format is not None or any(fmt.element in FLOATS for fmt in backend.accepts):
        return matrix
    made = quantize(matrix.data, backend.formats[0])
    return replace(made, bias=matrix.bias)
