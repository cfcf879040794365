"""vLLM's dense layers on ktk, as their codes are stored, where vLLM has no kernel for them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from vllm.model_executor.layers.linear import LinearMethodBase, UnquantizedLinearMethod

from ktk._core import Format
from ktk.backend import Backend
from ktk.checkpoint.quantization import read_quantization
from ktk.checkpoint.safetensors.scheme import StorageError
from ktk.checkpoint.safetensors.tensors import read_tensors
from ktk.errors import BackendError, CheckpointError
from ktk.expert import Matrix
from ktk.hosts.linear import OpLinear
from ktk.hosts.stored import IGNORED, refused, roles_of
from ktk.linear import Linear
from ktk.loading.cut import cut_columns, cut_rows
from ktk.names import PREFERRED
from ktk.quantize import dequantize
from ktk.registry import load_backend
from ktk.vllm.choice import say_once
from ktk.vllm.place import loads_dummies, number_of, pool_here
from ktk.vllm.reload import announce, is_counting

_FLOAT = "bf16"
# The parts whose rows one tensor holds, by what vLLM calls them.
_Parts = tuple[Hashable, ...]


def stock_or_ktk(
    stock: Any, layer: Any, prefix: str, quantization: Any, refusals: tuple[type[Exception], ...]
) -> Any:
    """Return what computes a dense layer: vLLM's own method, or ktk where that has no kernel.

    Parameters
    ----------
    stock
        vLLM's configuration of the checkpoint.
    layer, prefix
        The layer and its name.
    quantization
        The quantization_config of the checkpoint.
    refusals
        What it raises where it has none: for the method, or when that makes its weights.
    """
    try:
        method = stock.get_quant_method(layer, prefix)
    except refusals as error:
        return KtkDense(prefix, quantization, error)
    if method is None or isinstance(method, UnquantizedLinearMethod):
        return method or UnquantizedLinearMethod()
    create = method.create_weights

    @functools.wraps(create)
    def create_weights(layer: Any, *args: Any, **kwargs: Any) -> None:
        before = set(layer._parameters)
        try:
            create(layer, *args, **kwargs)
        except refusals as error:
            for name in set(layer._parameters) - before:
                del layer._parameters[name]
            layer.quant_method = KtkDense(prefix, quantization, error)
            layer.quant_method.create_weights(layer, *args, **kwargs)

    method.create_weights = create_weights
    return method


class KtkDense(LinearMethodBase):  # type: ignore[misc]
    """A dense layer of codes: its parts (q, k and v, say) are packed when all of them are there."""

    def __init__(self, name: str, quantization: Any, refusal: Exception) -> None:
        super().__init__()
        roles = roles_of(quantization)
        if roles is None:
            if why := refused(quantization, "vLLM"):
                raise ValueError(
                    f"{name}: vLLM says {str(refusal)!r}, and ktk does not compute {why}"
                ) from refusal
            raise refusal
        self._roles = roles
        self._name = name
        self._quantization = read_quantization({"quantization_config": quantization})
        self._held: dict[_Parts, dict[str, torch.Tensor]] = {}
        # What was packed since the last call: a part that comes then replaces one of these.
        self._last: dict[_Parts, dict[str, torch.Tensor]] = {}
        self._packed: OpLinear | None = None

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register a parameter without elements for each kind of tensor: loading them fills ktk."""
        self._columns = (input_size, input_size_per_partition)
        self._rows = list(output_partition_sizes)
        self._is_dummy = loads_dummies()
        self.number, self.width = number_of(self._name), sum(output_partition_sizes)
        for role in (*self._roles, *IGNORED):
            param = torch.nn.Parameter(
                torch.empty(0, dtype=params_dtype, device="cpu"), requires_grad=False
            )
            param.weight_loader = self._loader(layer, role)  # type: ignore[attr-defined]
            announce(param, 0 if role in IGNORED else len(self._rows))
            layer.register_parameter(role, param)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that the layer is there; make one up where vLLM is to measure and not to read."""
        if self._packed is None and self._is_dummy:
            random = (
                torch.randn(
                    self.width, self._columns[1], dtype=torch.float32, device="cpu"
                ).bfloat16()
                / 64
            )
            self._load([Matrix(Format(_FLOAT), random)])
        self._finish()

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Compute rows."""
        result: torch.Tensor = torch.ops.ktk.linear(x, self.number, self.width)
        return result if bias is None else result + bias

    def _finish(self) -> Linear:
        """Return the packed layer, if nothing that it needs is still to come."""
        if self._packed is None or self._held:
            came = {_listed(parts): sorted(tensors) for parts, tensors in self._held.items()}
            raise CheckpointError(
                f"{self._name} is not whole: it has {len(self._rows)} parts of "
                f"{', '.join(self._roles)} each, and these came: {came or 'none'}"
            )
        self._last = {}
        return self._packed.linear

    def _loader(self, layer: Any, role: str) -> Callable[..., None]:
        def take(param: Any, loaded_weight: torch.Tensor, loaded_shard_id: Any = None) -> None:
            """Take a tensor of a part, of several or of all; vLLM calls this for all it reads."""
            if role in IGNORED:
                return
            parts = self._named(layer, loaded_shard_id)
            if not is_counting(param, len(parts)):
                self._take(layer, role, loaded_weight, parts)

        return take

    def _named(self, layer: Any, shard: Any) -> _Parts:
        """Return the parts that a tensor holds: those of a tuple, or one; None: all."""
        known = self._parts(layer)
        if shard is None:
            return tuple(known)
        parts = shard if isinstance(shard, tuple) else (shard,)
        if unknown := [part for part in parts if part not in known]:
            raise CheckpointError(f"{self._name} has no part {unknown[0]!r}")
        return parts

    def _take(self, layer: Any, role: str, loaded_weight: torch.Tensor, parts: _Parts) -> None:
        if self._packed is not None:
            loaded_weight = loaded_weight.clone()  # its memory is the caller's
            if role in self._held.get(parts, {}):
                self._held = {}  # of an update that ended before all parts had come
            elif not self._held:
                self._held = {one: self._last[one] for one in self._last if one != parts}
            self._packed.renew(self._finish)
        self._held.setdefault(parts, {})[role] = loaded_weight.detach()
        whole = [one for one, tensors in self._held.items() if set(tensors) == set(self._roles)]
        if {part for one in whole for part in one} == set(self._parts(layer)):
            self._pack(layer, whole)

    def _parts(self, layer: Any) -> dict[Hashable, tuple[int, int]]:
        """Return the parts: the rows of each in the checkpoint, and the first that is ours."""
        rank, ranks = layer.tp_rank, layer.tp_size
        if hasattr(layer, "num_kv_head_replicas"):
            query, key, value = self._rows
            copies = layer.num_kv_head_replicas
            shared = rank // copies
            return {
                "q": (query * ranks, query * rank),
                "k": (key * ranks // copies, key * shared),
                "v": (value * ranks // copies, value * shared),
            }
        if self._columns[0] != self._columns[1]:
            ranks, rank = 1, 0  # divided by columns
        whole = getattr(layer, "output_sizes", None)
        if len(self._rows) == 1:
            whole = [layer.output_size]
        if whole is None or len(whole) != len(self._rows):
            raise CheckpointError(f"{self._name}: ktk does not know {type(layer).__name__} of vLLM")
        if ranks > 1 and self._rows == list(whole):
            ranks, rank = 1, 0  # not divided
        return {i: (n, n // ranks * rank) for i, n in enumerate(whole)}

    def _pack(self, layer: Any, whole: list[_Parts]) -> None:
        parts = self._parts(layer)
        held, self._held = self._held, {}
        is_update = self._packed is not None
        read: dict[Hashable, Matrix] = {}
        for one in whole:
            rows = [parts[part][0] for part in one]
            which = f" {_listed(one)}" if len(one) < len(parts) else ""
            matrix = self._read(held[one], sum(rows), which)
            for part, n, behind in zip(one, rows, itertools.accumulate(rows), strict=True):
                read[part] = _rows_of(matrix, behind - n, behind)
        matrices = [read[part] for part in parts]
        mine = [
            _rows_of(matrix, first, first + rows)
            for matrix, rows, (_, first) in zip(matrices, self._rows, parts.values(), strict=True)
        ]
        whole_columns, columns = self._columns
        if columns != whole_columns:
            first = columns * layer.tp_rank
            mine = [_columns_of(matrix, first, first + columns) for matrix in mine]
        self._load(mine)
        if is_update:
            assert self._packed is not None
            self._last = held
            self._packed.renew(self._finish)

    def _load(self, parts: list[Matrix]) -> None:
        backend = _backend_of(parts)
        if backend is None:
            backend = load_backend(PREFERRED[_FLOAT][0])
            parts = [_decoded(matrix) for matrix in parts]
        # vLLM says which process this is only while it makes the model.
        pool = pool_here() if self._packed is None else self._packed.linear.pool
        linear = Linear(backend, self._columns[1], self.width, pool=pool).load(parts)
        if self._packed is None:
            self._packed = OpLinear(linear, self._name, self.number)
        else:
            self._packed.renewed(linear)
        formats = ", ".join(dict.fromkeys(map(str, linear.formats)))
        say_once(f"ktk computes dense layers with {backend.name}/{linear.variant}: {formats}")

    def _read(self, tensors: Mapping[str, torch.Tensor], n: int, part: str) -> Matrix:
        cpu = {role: tensor.cpu() for role, tensor in tensors.items()}
        try:
            return read_tensors(cpu, n, self._columns[0], self._quantization)
        except StorageError as error:
            raise CheckpointError(f"{self._name}{part} {error}") from None


def _listed(parts: _Parts) -> str:
    return ", ".join(map(str, parts))


def _rows_of(matrix: Matrix, first: int, behind: int) -> Matrix:
    """Return rows; where a scale is for more rows than these, of floats."""
    if (first, behind) == (0, matrix.data.shape[0]):
        return matrix
    extent = _format(matrix).group_n
    if extent and first % extent:
        matrix = _decoded(matrix)
    return cut_rows(matrix, first, behind)


def _columns_of(matrix: Matrix, first: int, behind: int) -> Matrix:
    extent = _format(matrix).group_k
    if extent and first % extent:
        matrix = _decoded(matrix)
    return cut_columns(matrix, first, behind)


def _decoded(matrix: Matrix) -> Matrix:
    if _format(matrix).element == _FLOAT:
        return matrix
    values = dequantize(matrix)
    assert isinstance(values, torch.Tensor)
    return Matrix(Format(_FLOAT), values.bfloat16(), bias=matrix.bias)


def _backend_of(matrices: list[Matrix]) -> Backend | None:
    """Return the backend that stores all of them as they are; None if there is none."""
    for name in _names({_format(matrix).element for matrix in matrices}):
        try:
            backend = load_backend(name)
            for matrix in matrices:
                fmt, (n, items) = _format(matrix), matrix.data.shape
                shape = n, items * (2 if fmt.block[0] == 2 else 1)
                if not backend.core.stored_as(fmt, *shape).same_as(fmt, *shape):
                    break
            else:
                return backend
        except (BackendError, ValueError):
            continue
    return None


def _names(elements: set[str]) -> Iterator[str]:
    lists = [PREFERRED.get(element, ()) for element in elements]
    yield from (name for name in lists[0] if all(name in other for other in lists))


def _format(matrix: Matrix) -> Format:
    assert matrix.format is not None, "schemes know what they decode"
    return matrix.format
