"""The operators "ktk::linear" and "ktk::rows" of torch: a packed dense layer that graphs can have.

Compilers trace them by shapes and leave each as one node. CPU tensors are computed at once, tensors
elsewhere on copies.
"""

from __future__ import annotations

import itertools
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from ktk.linear import Linear

# Arguments of an operator are tensors and numbers: a layer goes by its number.
_layers: WeakValueDictionary[int, OpLinear] = WeakValueDictionary()
_numbers = itertools.count()
# Unpacked as f32, each of these is again what is stored.
_FLOATS = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


class OpLinear:
    """A dense layer that "ktk::linear" computes.

    Copies, deep ones too, are the same object: packed weights never change.

    Parameters
    ----------
    linear : Linear
        The layer, with its weight.
    name : str
        What errors call it.

    Attributes
    ----------
    number : int
        Stands for the layer among the operators' arguments, as long as this object lives.
    """

    def __init__(self, linear: Linear, name: str) -> None:
        self.linear = linear
        self.name = name
        self.number = next(_numbers)
        _layers[self.number] = self

    @property
    def dtype(self) -> torch.dtype | None:
        """What the weight is stored as, where that is floats and can be saved again."""
        dtypes = {_FLOATS.get(fmt.element) for fmt in self.linear.formats}
        return dtypes.pop() if len(dtypes) == 1 else None

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


def _linear(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    """Compute CPU tensors on the layer's pool."""
    out = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    _layers[layer].linear(x.detach(), out=out)
    return out


def _linear_elsewhere(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return _linear(x.cpu(), layer, width).to(x.device)


def _linear_shape(x: torch.Tensor, layer: int, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _rows(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty((*ids.shape, width), dtype=dtype)
    _layers[layer].linear.rows(ids.contiguous(), out=out)
    return out


def _rows_elsewhere(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return _rows(ids.cpu(), layer, width, dtype).to(ids.device)


def _rows_shape(ids: torch.Tensor, layer: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return ids.new_empty((*ids.shape, width), dtype=dtype)


def _backward(ctx: Any, grad: torch.Tensor) -> NoReturn:
    raise RuntimeError(
        "a gradient was asked through a dense layer that ktk has packed, and it has no backward: "
        "compute under torch.no_grad(), or train with a model whose dense layers are not packed"
    )


# Beside "ktk::moe", which `op` defines.
_library: Any = torch.library.Library("ktk", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("linear(Tensor x, int layer, SymInt width) -> Tensor")
_library.impl("linear", _linear, "CPU")
_library.impl("linear", _linear_elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::linear", _linear_shape, lib=_library)
torch.library.register_autograd("ktk::linear", _backward, lib=_library)
_library.define("rows(Tensor ids, int layer, SymInt width, ScalarType dtype) -> Tensor")
_library.impl("rows", _rows, "CPU")
_library.impl("rows", _rows_elsewhere, "CompositeExplicitAutograd")
torch.library.register_fake("ktk::rows", _rows_shape, lib=_library)
