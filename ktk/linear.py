"""A dense layer on the CPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ktk import _core
from ktk.arrays import Array, check_writable, empty_like, is_tensor, readable, writable
from ktk.errors import BackendUnsupported
from ktk.expert import Matrix
from ktk.formats import formats_named
from ktk.given import matrix_of, read_matrix
from ktk.layer import check_shards, integer
from ktk.pool import default_pool
from ktk.protocols import BackendLike
from ktk.ticket import Ticket
from ktk.training import linear_backward

if TYPE_CHECKING:
    import numpy as np

#: A weight, or its parts: rows that lie one behind the other.
Weight = Array | Matrix | Sequence[Array | Matrix]
_Beside = Array | Sequence[Array | None] | None
_Named = _core.Format | str | None
_Formats = _Named | Sequence[_Named]


class Linear:
    """A dense layer, ``y = x @ weight.T + bias``, packed for one variant of a backend.

    It is for what stands beside the experts of a model that runs on CPUs alone: attention, shared
    experts, the output head. Any backend computes it, on the same workers as layers of experts, and
    the same bits come out for any number of threads, and for a row whatever rows stand beside it.

    ::

        linear = ktk.Linear("AMXINT8", in_features=2048, out_features=4096)
        linear.load(weight)                     # [4096, 2048]: floats, or what a checkpoint stores
        y = linear(x)                           # [..., 2048] -> [..., 4096], of x's dtype

        qkv = ktk.Linear("LLAMAFILE", 2048, 5120).load([q, k, v])   # parts, stored as each is
        q, k, v = qkv(x).split([4096, 512, 512], dim=-1)

    Parameters
    ----------
    backend : str or Backend
        A name that :func:`ktk.load_backend` takes, or what that returned.
    in_features, out_features : int
        Columns and rows of the weight.
    bias : bool, optional
        Whether a bias is loaded with the weight.
    variant : str, optional
        Name of a variant; by default the best one that runs here.
    force : bool
        Take `variant` even where CPUID does not show its instructions (emulators).
    pool : WorkerPool, optional
        By default the pool of the process, :func:`ktk.default_pool`.
    shards : int, optional
        Parts of the rows of the weight, each in the memory of one NUMA node; by default one per
        node that has workers, or as many as 32 rows allow. A backend that chooses a scale for many
        rows chooses one for each shard.
    weight_format : Format or its name, or list of such, optional
        What to store the weight as, where the backend offers a choice; a list has an entry for each
        part that is loaded.

    Raises
    ------
    BackendError
        The backend is not there, or cannot run on this CPU; see :func:`ktk.load_backend`.
    ValueError
        For sizes and numbers of shards that make no sense.
    """

    def __init__(
        self,
        backend: str | BackendLike,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
        weight_format: _Formats = None,
    ) -> None:
        if isinstance(backend, str):
            from ktk.registry import load_backend

            backend = load_backend(backend)
        if not isinstance(getattr(backend, "core", None), _core.Backend):
            raise TypeError(
                f"backend must be a name or a Backend of ktk.load_backend, got {backend!r}"
            )
        if pool is not None and not isinstance(pool, _core.WorkerPool):
            raise TypeError(f"pool must be a ktk.WorkerPool or None, got {pool!r}")
        if variant is not None and not isinstance(variant, str):
            raise TypeError(f"variant must be the name of a variant or None, got {variant!r}")
        check_shards(shards)
        self.backend = backend
        self.in_features = _size("in_features", in_features)
        self.out_features = _size("out_features", out_features)
        self.bias = bool(bias)
        self._stored = formats_named("weight_format", weight_format)
        workers = pool or default_pool()
        try:
            self._core = _core.Linear(
                backend.core,
                workers,
                self.in_features,
                self.out_features,
                variant=variant or "",
                force=bool(force),
                shards=shards or 0,
            )
        except RuntimeError as error:
            raise BackendUnsupported(str(error)) from error

    def load(
        self,
        weight: Weight,
        scale: _Beside = None,
        zero: _Beside = None,
        bias: _Beside = None,
        given: _Formats = None,
        factor: _Beside = None,
    ) -> Linear:
        """Pack the weight; the arrays may go afterwards. What was loaded before is replaced.

        Parameters
        ----------
        weight : array [out_features, in_features]
            f32, f16 or bf16, or what else the backend accepts; or what
            :func:`ktk.quantize.quantize` returns, or a :class:`ktk.expert.Matrix`, which bring
            their scale, zero, bias and format. 8-bit floats are torch.float8_e4m3fn or
            float8_e5m2; two 4-bit elements share a uint8, or are torch.float4_e2m1fn_x2; ggml's
            types are uint8 [rows, bytes of a row].

            A list or tuple of such is the parts of a weight, [rows, in_features] each, whose rows
            lie one behind the other: q, k and v, or gate and up, as one product of one input. Each
            may be stored in another format.
        scale, zero : array [groups of n, groups of k], optional
            As in :meth:`ktk.MoE.load_expert`. For parts: a list with an entry for each, or None.
        bias : array [out_features], optional
            Of floats. For parts: a list of arrays [rows]; None in it is a bias of zeros.
        given : Format or its name, optional
            What the arrays hold, where their dtypes do not tell. For parts: one for all, or a list.
        factor : array [1], optional
            An f32 that multiplies the whole matrix, as in :meth:`ktk.MoE.load_expert`. For parts: a
            list with an entry for each, or None.

        Returns
        -------
        Linear
            self.

        Raises
        ------
        RuntimeError
            A tensor requires grad while torch records gradients.
        TypeError
            An array has a dtype that ktk does not read.
        ValueError
            The backend does not take what is given; an array has another shape than the sizes of
            the layer mean; or there is a bias where none was announced, or the other way round.
        """
        if isinstance(weight, (list, tuple)):
            if not weight:
                raise ValueError("weight has no parts")
            names = [f"weight[{i}]" for i in range(len(weight))]
            parts = list(weight)
        else:
            names, parts = ["weight"], [weight]
        several = isinstance(weight, (list, tuple))
        beside = [
            _each(name, value, len(parts), several)
            for name, value in (
                ("scale", scale),
                ("zero", zero),
                ("bias", bias),
                ("factor", factor),
            )
        ]
        formats = _for_parts("given", formats_named("given", given), len(parts))
        stored = _for_parts("weight_format", self._stored, len(parts))
        matrices = [
            _read(name, self.backend, *one)
            for name, *one in zip(names, parts, *beside, formats, strict=True)
        ]
        has_bias = any(matrix.bias is not None for matrix in matrices)
        if has_bias and not self.bias:
            raise ValueError("weight has a bias: make the layer with bias=True, or load no bias")
        if self.bias and not has_bias:
            raise ValueError("the bias is missing: give bias, or make the layer with bias=False")
        self._core.load(
            names,
            [matrix.data for matrix in matrices],
            [matrix.scale for matrix in matrices],
            [matrix.zero for matrix in matrices],
            [matrix.bias for matrix in matrices],
            [matrix.factor for matrix in matrices],
            [matrix.order for matrix in matrices],
            [matrix.format for matrix in matrices],
            stored,
        )
        return self

    def __call__(self, x: Array, out: Array | None = None) -> Array:
        """Multiply rows with the weight.

        Parameters
        ----------
        x : array [..., in_features]
            bf16, f16 or f32, in CPU memory, with any leading dimensions and any strides.
        out : array [..., out_features], optional
            Where to write: bf16, f16 or f32, its rows all at one distance. May be or overlap `x`,
            whose rows are copied then.

        Returns
        -------
        array [..., out_features]
            `out`, or a new array of the library and dtype of `x`.

        Raises
        ------
        RuntimeError
            Nothing is loaded; or a tensor requires grad while torch records gradients: nothing here
            has a backward.
        TypeError, ValueError
            An array has another dtype or shape; the message says what was expected and what came.
        """
        result = empty_like(x, "x", self.out_features) if out is None else out
        # Unbound: torch.compile, which lets this run as it is, would lose what it is bound to.
        _core.Linear.forward(self._core, readable("x", x), writable("out", result))
        return result

    def submit(self, x: Array, out: Array | None = None) -> Ticket:
        """Queue a call and return at once.

        The input is copied and may be changed when this returns. Calls that are submitted to layers
        on one pool, of experts or dense, run in the order of their submission. Parameters as in a
        call.
        """
        result = empty_like(x, "x", self.out_features) if out is None else out
        check_writable("out", result)
        # The call keeps `result`, so that its memory outlives the call.
        return Ticket(_core.LinearCall(self._core, readable("x", x), result), result)

    def backward(self, grad: Array, out: Array | None = None) -> Array:
        """Compute the gradient of what a call multiplied; the weight is frozen.

        That is grad times the weight, without a second copy of it: rows are unpacked as they are
        needed. Factors of low rank beside the layer are two more products, of PEFT's or the
        caller's own, whose gradients are the caller's library's.

        Parameters
        ----------
        grad : array [..., out_features]
            The gradient of what the call returned: bf16, f16 or f32.
        out : array [..., in_features], optional
            Where to write: bf16, f16 or f32.

        Returns
        -------
        array [..., in_features]
            `out`, or a new array of the library and dtype of `grad`; the same bits for any number
            of threads.

        Raises
        ------
        BackendError
            The backend of bf16 weights, which multiplies, is not there.
        RuntimeError
            Nothing is loaded.
        TypeError, ValueError
            An array has another dtype or shape; the message says what was expected and what came.
        """
        grad = grad.detach() if is_tensor(grad) else grad
        result = empty_like(grad, "grad", self.in_features) if out is None else out
        return linear_backward(self, grad, result)

    def rows(self, ids: Array | Sequence[int], out: Array | None = None) -> Array:
        """Return rows of the weight as they are stored: a lookup of embeddings in a tied head.

        Parameters
        ----------
        ids : array of int [...], or sequence of int
            int32 or int64, each from 0 to out_features - 1.
        out : array [..., in_features], optional
            Where to write: f32, bf16 or f16.

        Returns
        -------
        array [..., in_features]
            `out`, or a new f32 array of the library of `ids`. The values are exactly what products
            are computed with, rounded to the dtype of `out`: those of the checkpoint where the
            format that is stored can hold them.

        Raises
        ------
        IndexError
            An id is no row of the weight.
        RuntimeError
            Nothing is loaded.
        TypeError, ValueError
            An array has another dtype or shape.
        """
        import numpy as np

        listed = isinstance(ids, Sequence)
        wanted: Array = np.asarray(ids) if listed else ids
        if not hasattr(wanted, "shape"):
            raise TypeError(f"ids must be an array or a sequence of int, got {ids!r}")
        if listed and not wanted.size:
            wanted = wanted.astype(np.int64)  # floats, to numpy
        if out is None:
            shape = (*wanted.shape, self.in_features)
            if is_tensor(wanted):
                import torch

                out = torch.empty(shape, dtype=torch.float32, device="cpu")
            else:
                out = np.empty(shape, dtype=np.float32)
        _core.Linear.look_up(self._core, readable("ids", wanted), writable("out", out))
        return out

    def unpack(self) -> np.ndarray:
        """Return the weight as it is stored, in f32 [out_features, in_features]."""
        return self._core.unpack()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write what is packed into a file, for `from_file`.

        The file has the codes, scales and bias as a checkpoint would give them, or in fewer bytes
        where the backend stores fewer and gives them back: it depends neither on this CPU nor on
        threads or shards. It appears when it is complete; a process that dies before leaves the
        file that was there, and one beside it, ``.ktk-part``, which the next that saves removes.

        Parameters
        ----------
        path : path
            Of the file, which is replaced.

        Raises
        ------
        OSError
            It cannot be written.
        ValueError
            Nothing is loaded, or the backend cannot give back what it packed.
        """
        from ktk.checkpoint.packed.linear import write_linear

        write_linear(Path(path), self)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        backend: str | BackendLike | None = None,
        *,
        variant: str | None = None,
        force: bool = False,
        pool: _core.WorkerPool | None = None,
        shards: int | None = None,
    ) -> Linear:
        """Make a layer of what `save` wrote.

        Parameters
        ----------
        path : path
            Of the file.
        backend : str or Backend, optional
            By default the one that it was written for. Another must take what is stored.
        variant, force, pool, shards
            As for a new layer.

        Raises
        ------
        BackendError
            The backend is not there, or cannot run on this CPU; or that of packed bytes, of the
            file, is not.
        CheckpointError
            The file is missing, damaged, no such file, or of another version of ktk.
        ValueError
            The backend does not take what is stored.
        """
        from ktk.checkpoint.packed.linear import read_linear

        saved = read_linear(Path(path))
        layer = cls(
            backend or saved.backend,
            saved.in_features,
            saved.out_features,
            saved.bias is not None,
            weight_format=[part.format for part in saved.parts],
            variant=variant,
            force=force,
            pool=pool,
            shards=shards,
        )
        try:
            return layer.load(saved.parts, bias=saved.biases)
        except ValueError as error:
            raise ValueError(f"{path} was written for {saved.backend}: {error}") from error

    @property
    def variant(self) -> str:
        """Name of the variant that computes."""
        return str(self._core.variant)

    @property
    def pool(self) -> _core.WorkerPool:
        """The workers that compute."""
        return self._core.pool

    @property
    def shards(self) -> int:
        """Parts that the weight is divided into; at most, before it is loaded."""
        return int(self._core.shards)

    @property
    def formats(self) -> tuple[_core.Format, ...]:
        """What each part of the weight is stored as; none before it is loaded."""
        return tuple(self._core.formats)

    @property
    def nbytes(self) -> int:
        """Packed bytes of the weight, without the bias; 0 before it is loaded."""
        return int(self._core.nbytes)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ktk.Linear cannot be pickled or copied: its weight lies packed in the memory of "
            "this process; load another one from the same checkpoint or arrays"
        )

    def __repr__(self) -> str:
        bias = ", bias" if self.bias else ""
        return (
            f"<ktk.Linear {self.backend.name}/{self.variant}: {self.in_features} -> "
            f"{self.out_features}{bias}, {self.nbytes / 2**20:.1f} MiB>"
        )


# torch.compile must run calls rather than trace them: what it traces with has no values.
for _name in ("__call__", "submit", "rows", "backward"):
    getattr(Linear, _name)._torchdynamo_disable = True


def _size(name: str, value: Any) -> int:
    size = integer(name, value)
    if size < 1:
        raise ValueError(f"{name} must be at least 1, got {size}")
    return size


def _for_parts(name: str, formats: Any, parts: int) -> list[Any]:
    return _each(name, formats if isinstance(formats, list) else [formats] * parts, parts, True)


def _each(name: str, value: Any, parts: int, several: bool) -> list[Any]:
    """Return what stands beside each part of a weight."""
    if value is None:
        return [None] * parts
    if not several:
        return [value]
    if not isinstance(value, (list, tuple)) or len(value) != parts:
        got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else repr(type(value))
        raise ValueError(
            f"{name} must be a list with an entry for each of {parts} parts, got {got}"
        )
    return list(value)


def _read(name: str, backend: BackendLike, data: Any, *beside: Any) -> Matrix:
    """Make one part ready for the core."""
    if data is None:
        raise TypeError(f"{name} is missing")
    matrix = matrix_of(name, data, *beside)
    return read_matrix(name, matrix, backend.name, backend.accepts)
