"""Computes dense layers as a checkpoint stores them in codes, which transformers would decode.

Codes that no backend has are decoded here, too, without the packages that wrote them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ktk.backend import Backend
from ktk.checkpoint.config import entries_of
from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.files import read_json
from ktk.checkpoint.quantization import Quantization, read_quantization
from ktk.checkpoint.safetensors.index import TensorIndex
from ktk.checkpoint.safetensors.single import StoredMatrix, find_matrix, stems
from ktk.errors import BackendError, CheckpointError
from ktk.names import DECODED, PREFERRED
from ktk.quantize import dequantize
from ktk.registry import load_backend
from ktk.transformers.config import KtkConfig
from ktk.transformers.files import CODES
from ktk.transformers.linears import (
    head_of,
    linears_of,
    packed_matrix,
    put_head,
    put_linear,
    takes,
)
from ktk.transformers.modules import say_once


@dataclass(frozen=True)
class Coded:
    """Matrices in codes that ktk is to see to.

    Attributes
    ----------
    packed
        Dense layers by name, and what each is packed for.
    decoded
        Others by name, which become floats.
    dtype
        Of these floats, and what packed layers say of their weights.
    """

    packed: dict[str, tuple[StoredMatrix, Backend]]
    decoded: dict[str, StoredMatrix]
    dtype: torch.dtype

    def leave_out(self, model: Any) -> None:
        """Take the weights of packed layers out of a model that is to be loaded."""
        known = model._keys_to_ignore_on_load_unexpected or ()
        patterns = set()
        for name, (matrix, _) in self.packed.items():
            model.get_submodule(name)._parameters["weight"] = None
            model.get_submodule(name)._is_hf_initialized = True
            patterns |= {rf"^{re.escape(one)}\." for one in (name, matrix.stem)}
        for name, matrix in self.decoded.items():
            patterns |= {rf"^{re.escape(one)}\." for one in (name, matrix.stem)}
        model._keys_to_ignore_on_load_unexpected = {*known, *patterns}
        # Their weights are filled in later, and are not missed.
        later = {rf"^{re.escape(name)}\.weight$" for name in self.decoded}
        later |= {rf"^{re.escape(target)}$" for target, _ in self._tied(model)}
        model._keys_to_ignore_on_load_missing = {
            *(model._keys_to_ignore_on_load_missing or ()),
            *later,
        }

    def finish(self, model: Any) -> None:
        """Read and pack the matrices, when the other weights are there."""
        head = head_of(model)
        for name, (matrix, backend) in self.packed.items():
            layer = packed_matrix(backend, matrix.read(), name)
            if head is not None and name == head[0]:
                put_head(model, name, layer, self.dtype)
            else:
                put_linear(model, name, layer, self.dtype)
        for name, matrix in self.decoded.items():
            values = dequantize(matrix.read())
            assert isinstance(values, torch.Tensor)
            weight = nn.Parameter(values.to(self.dtype), requires_grad=False)
            model.get_submodule(name).weight = weight
        for target, source in self._tied(model):
            module, _, parameter = target.rpartition(".")
            setattr(model.get_submodule(module), parameter, model.get_parameter(source))

    def _tied(self, model: Any) -> Iterator[tuple[str, str]]:
        """Yield the names of weights that are tied to decoded ones, and of these."""
        for target, source in model.all_tied_weights_keys.items():
            if source.removesuffix(".weight") in self.decoded:
                yield target, source


def all_known(folder: Path) -> bool:
    """Whether ktk can compute all matrices in codes that are no experts.

    Then the quantizer of the format, and what that needs installed, is not needed.
    """
    try:
        with TensorIndex(folder) as index:
            quantization = _quantization(folder)
            rest = {name for name in _others(index) if index.dtype(name).startswith(CODES)}
            for stem in stems(index):
                matrix = None if _of_experts(stem) else find_matrix(index, stem, quantization)
                if matrix is not None and backend_of(matrix) is not None:
                    rest -= {stem + part.suffix for part in matrix.scheme.tensors.values()}
            return not rest
    except (CheckpointError, EntryError, OSError):
        return False


def on_cpu(device_map: Any) -> bool:
    """Whether a model is loaded to CPU memory."""
    places = set(map(str, device_map.values() if isinstance(device_map, dict) else [device_map]))
    return places <= {"None", "cpu"} or not torch.accelerator.is_available()


def plan_codes(index: TensorIndex, model: Any, config: KtkConfig, dtype: torch.dtype) -> Coded:
    """Return what ktk is to see to, of a model whose checkpoint `all_known` knows."""
    quantization = _quantization(index.folder)
    linears: dict[str, str | None] = dict.fromkeys(linears_of(model), config.linears)
    if (head := head_of(model)) is not None:
        linears[head[0]] = config.head
    modules = dict(model.named_modules())
    renamed = _renaming(model)
    packed, decoded = {}, {}
    rounded: dict[tuple[str, str], list[str]] = {}
    for stem in stems(index):
        name = renamed(f"{stem}.weight").removesuffix(".weight")
        module = modules.get(name)
        if _of_experts(stem) or module is None:
            continue
        if (matrix := find_matrix(index, stem, quantization)) is None:
            continue
        asked = linears.get(name)
        backend = backend_of(matrix) if asked is None else load_backend(asked)
        if name in linears and backend and module.weight.shape == matrix.shape:
            packed[name] = matrix, backend
            if asked is None and not _keeps(backend, matrix):
                rounded.setdefault((matrix.scheme.name, backend.name), []).append(name)
        else:
            decoded[name] = matrix
    for (stored, to), names in rounded.items():
        say_once(
            f"{len(names)} dense layers that are stored as {stored}, {names[0]} among them, are "
            f"decoded and rounded for {to}: no backend has such codes"
        )
    return Coded(packed, decoded, dtype)


def backend_of(matrix: StoredMatrix) -> Backend | None:
    """Return the backend that computes a matrix in the codes that it has, or else decoded.

    None if neither can be loaded here.
    """
    for exactly, names in ((True, PREFERRED.get(matrix.format.element, ())), (False, DECODED)):
        for name in names:
            try:
                backend = load_backend(name)
            except BackendError:
                continue
            if not exactly or _keeps(backend, matrix):
                return backend
    return None


def _keeps(backend: Backend, matrix: StoredMatrix) -> bool:
    """Whether a backend stores a matrix as it is."""
    fmt, shape = matrix.format, matrix.shape
    return takes(backend, fmt, shape) and backend.core.stored_as(fmt, *shape).same_as(fmt, *shape)


def _others(index: TensorIndex) -> Iterator[str]:
    return (name for name in index.names() if not _of_experts(name))


def _of_experts(name: str) -> bool:
    return ".experts." in name


def _quantization(folder: Path) -> Quantization:
    return read_quantization(entries_of(read_json(folder / "config.json")))


def _renaming(model: Any) -> Callable[[str], str]:
    """Return what gives a tensor of the files its name in the model, as transformers loads it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    state = model.state_dict()

    def renamed(key: str) -> str:
        return rename_source_key(key, renamings, converters, model.base_model_prefix, state)[0]

    return renamed
