"""The operators "ktk::linear" and "ktk::rows" of torch: a packed dense layer that graphs can have.

Compilers trace them by shapes and leave each as one node. CPU tensors are computed at once, tensors
elsewhere on copies.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from ktk import _core
from ktk.arrays import readable, writable
from ktk.dtypes import FLOAT_DTYPES
from ktk.hosts.numbered import enter, living
from ktk.linear import Linear

#: Each `OpLinear` that lives, by its `number`.
LAYERS: WeakValueDictionary[int, OpLinear] = WeakValueDictionary()
_numbers = itertools.count()


class OpLinear:
    """A dense layer that "ktk::linear" computes.

    Copies, deep ones too, are the same object: packed weights are changed by none but a host that
    hands over others.

    Parameters
    ----------
    linear : Linear
        The layer, with its weight.
    name : str
        What errors call it.
    number : int, optional
        As of :class:`ktk.hosts.OpLayer`.

    Raises
    ------
    RuntimeError
        Another layer has the number, and lives.

    Attributes
    ----------
    number : int
        Stands for the layer among the operators' arguments, as long as this object lives.
    """

    def __init__(self, linear: Linear, name: str, number: int | None = None) -> None:
        self.name = name
        self.number = next(_numbers) if number is None else number
        self.linear = linear
        self._finish: Callable[[], Linear] | None = None
        self._renewing = threading.Lock()
        self._together: tuple[_core.LinearGroup, int] | None = None
        enter(LAYERS, self.number, self)

    def renew(self, finish: Callable[[], Linear]) -> None:
        """Let the next call compute with what `finish` returns then, or raise what it raises."""
        self._finish = finish

    def renewed(self, linear: Linear) -> None:
        """Compute with a layer, of the same sizes, from now on."""
        self.linear, self._finish, self._together = linear, None, None

    @property
    def dtype(self) -> torch.dtype | None:
        """What the weight is stored as, where that is floats and can be saved again."""
        dtypes = {FLOAT_DTYPES.get(fmt.element) for fmt in self.linear.formats}
        return dtypes.pop() if len(dtypes) == 1 else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute a CPU tensor on the layer's pool, past torch's dispatcher.

        Parameters
        ----------
        x : tensor [..., in_features]
            That `is_plain`.

        Returns
        -------
        tensor [..., out_features]
            Of the dtype of `x`.
        """
        return _linear(x, self.number, self.linear.out_features)

    def _compute(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._finish is not None:
            with self._renewing:
                if self._finish is not None:
                    self.renewed(self._finish())
        if self._together is None:
            self.linear(x, out=out)
        else:
            group, index = self._together
            group.forward(index, readable("x", x), writable("out", out))

    def __copy__(self) -> OpLinear:
        return self

    def __deepcopy__(self, memo: Any) -> OpLinear:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.name} cannot be pickled: its weight lies packed in the memory of this process. "
            "Load the model in each process from its files"
        )

    def __repr__(self) -> str:
        return repr(self.linear)


def compute_together(layers: Sequence[OpLinear]) -> None:
    """Let layers that are called one after the other with the same input be computed at once.

    That is so for few rows. Results, and what else the layers are called with, do not change.

    Raises
    ------
    ValueError
        There are fewer than two, or their widths of input or their pools differ.
    """
    group = _core.LinearGroup([layer.linear._core for layer in layers])
    for index, layer in enumerate(layers):
        layer._together = group, index


def _linear(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """Compute CPU tensors on the layer's pool."""
    out = x.new_empty((*x.shape[:-1], width))
    living(LAYERS, layer)._compute(x.detach(), out)
    return out


def _linear_elsewhere(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return _linear(x.cpu(), layer, width).to(x.device)


def _linear_shape(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _rows(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((*ids.shape, width), dtype=dtype, device="cpu")
    living(LAYERS, layer).linear.rows(ids.contiguous(), out=out)
    return out


def _rows_elsewhere(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return _rows(ids.cpu(), layer, width, dtype).to(ids.device)


def _rows_shape(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.layer, ctx.width = inputs[1], inputs[0].shape[-1]
    ctx.known = LAYERS.get(ctx.layer)  # which may be the last that keeps it


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return torch.ops.ktk.linear_backward(grad, ctx.layer, ctx.width), None, None


# Beside "ktk::moe", which `op` defines.
_library: Any = torch.library.Library("ktk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, int layer, SymInt width) -> Tensor")
_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear_elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::linear", _linear_shape, lib=_library)
torch.library.register_autograd("ktk::linear", _backward, setup_context=_save, lib=_library)
_library.define("rows(Tensor ids, int layer, SymInt width, ScalarType dtype) -> Tensor")
_library.impl("rows", _rows, "CPU")
_library.impl("rows", _rows_elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::rows", _rows_shape, lib=_library)
