"""A module of experts whose weights ktk has packed: what is left in the place of its tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ktk.config import PARTS
from ktk.dtypes import FLOAT_DTYPES
from ktk.hosts.op import OpLayer, unpicklable
from ktk.moe import MoE
from ktk.transformers.layout import BIASES, WEIGHTS, Layout

#: Where a module keeps what it was packed into: None before, False if it is not to be packed.
SLOT = "ktk_packed"


class Packed(OpLayer):
    """The packed experts of a module, in a slot of it."""

    def __init__(
        self, moe: MoE, layout: Layout, name: str, compute: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(moe, name, compute=compute)
        self.layout = layout

    @property
    def dtype(self) -> torch.dtype | None:
        """What the weights are stored as, where that is floats and can be saved again."""
        if len(self.moe.loaded) < self.moe.config.num_experts:
            return None  # other processes have the others
        formats = (self.moe.format, self.moe.up_format, self.moe.down_format)
        dtypes = [FLOAT_DTYPES.get(fmt.element) if fmt is not None else None for fmt in formats]
        known = [dtype for dtype in dtypes if dtype is not None]
        if len(known) < len(dtypes):
            return None
        return known[0] if len(set(known)) == 1 else torch.float32

    def unpacked(self) -> dict[str, torch.Tensor]:
        """Return the tensors that transformers would have, without biases, which it still has."""
        assert self.dtype is not None
        weights = self.layout.empty(self.moe.config, self.dtype)
        for number in range(self.moe.config.num_experts):
            values = dict(zip(PARTS, self.moe.unpack_expert(number), strict=True))
            self.layout.put(weights, number, values)
        return weights


class Freed:
    """Stands where a module had a tensor, so that whoever reaches for one is told."""

    def __init__(self, where: str) -> None:
        self._where = where

    def _sentence(self) -> str:
        return (
            f"{self._where} is packed by ktk, and no tensor any more: load the model without "
            'experts_implementation="ktk" to compute its experts otherwise'
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._sentence())

    def __getitem__(self, key: Any) -> NoReturn:
        raise RuntimeError(self._sentence())

    def __deepcopy__(self, memo: Any) -> Freed:
        return self

    def __reduce__(self) -> NoReturn:
        raise unpicklable(self._where)

    def __repr__(self) -> str:
        return f"<{self._where}: packed by ktk>"


def packed_of(module: Any) -> Packed | bool | None:
    """Return what a module was packed into; None before, False if it is not to be packed."""
    return getattr(module, SLOT, None)


def put(module: Any, packed: Packed) -> None:
    """Give a module its packed experts; its weight tensors go, if they did not yet."""
    drop_weights(module, packed.name)
    for name in BIASES:  # the layer has copies of these
        if (bias := module._parameters.get(name)) is not None:
            bias.requires_grad_(False)
    object.__setattr__(module, SLOT, packed)
    object.__setattr__(module, "extra_repr", packed.__repr__)


def leave_alone(module: Any) -> None:
    """Decide that a module is not to be packed."""
    object.__setattr__(module, SLOT, False)


def drop_weights(module: Any, name: str, *also: str) -> None:
    """Take the weights out of a module; biases, which are small, stay to be saved.

    Names of biases that are to go, too, may follow.
    """
    for weight in (*WEIGHTS, *also):
        if module._parameters.pop(weight, None) is not None:
            object.__setattr__(module, weight, Freed(f"{name}.{weight}"))


def packed_modules(model: torch.nn.Module) -> dict[str, Packed]:
    """Return what the modules of a model were packed into, by their names."""
    each = ((name, packed_of(module)) for name, module in model.named_modules())
    return {name: packed for name, packed in each if isinstance(packed, Packed)}
