"""Arrays as users have them, numpy, torch or anything with DLPack, made into what the core reads.

Neither torch nor numpy is imported to ask what an array is: it can only be theirs where somebody
imported them before.
"""

from __future__ import annotations

import sys
from typing import Any

Array = Any  # numpy, torch or anything else that speaks DLPack


def is_tensor(array: Array) -> bool:
    """Whether an array is a tensor of torch."""
    # Where torch was not imported, or is just being so, nothing is a tensor.
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and isinstance(array, tensor)


def refuse_gradient(name: str, tensor: Any) -> None:
    """Refuse a tensor through which somebody expects gradients to flow.

    Raises
    ------
    RuntimeError
        It requires grad, and torch records gradients at the moment.
    """
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise RuntimeError(
            f"{name} requires grad, but ktk computes inference only: no gradient would reach it. "
            f"Use torch.no_grad() or torch.inference_mode(), or pass {name}.detach(); "
            "docs/training.md says what computes gradients"
        )


def readable(name: str, array: Array) -> Array:
    """Return what the core reads without a copy: of a tensor, a DLPack capsule.

    A tensor would export itself as well, but does that in Python: 2 us each, while a token of a
    layer takes some hundred.
    """
    if not is_tensor(array):
        return array
    torch: Any = sys.modules["torch"]
    if array.requires_grad:
        refuse_gradient(name, array)
        array = array.detach()
    if array.is_neg():  # a view whose values are those of its memory negated: z.conj().imag
        array = array.resolve_neg()
    try:
        return torch.to_dlpack(array)
    except (RuntimeError, BufferError):  # sparse, say: the core's message names the argument
        return array


def check_writable(name: str, array: Array) -> None:
    """Refuse an array that cannot be written to.

    Raises
    ------
    RuntimeError
        As `refuse_gradient`.
    ValueError
        It is a tensor whose memory has its values negated.
    """
    if not is_tensor(array):
        return
    refuse_gradient(name, array)
    if array.is_neg():
        raise ValueError(
            f"{name} is a view whose memory has its values negated (torch.Tensor.is_neg), which "
            "cannot be written to: give a tensor of its own"
        )


def writable(name: str, array: Array) -> Array:
    """Return what the core writes to without a copy; raises what `check_writable` does."""
    check_writable(name, array)
    return readable(name, array)


def empty_like(array: Array, name: str = "hidden", columns: int | None = None) -> Array:
    """Return a new array of the library, shape and dtype of `array`; of others, a tensor.

    `columns` is its last dimension, where that differs; `name` is for messages.
    """
    import numpy as np

    if isinstance(array, np.ndarray):
        return np.empty(_shape(array, columns), dtype=array.dtype)
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} must be an array, of any library, got {type(array).__name__}")
    import torch  # numpy has no bfloat16

    if isinstance(array, torch.Tensor):
        return array.new_empty(_shape(array, columns))
    tensor = torch.utils.dlpack.from_dlpack(array)
    return torch.empty(_shape(tensor, columns), dtype=tensor.dtype, device="cpu")


def _shape(array: Array, columns: int | None) -> tuple[int, ...]:
    return tuple(array.shape) if columns is None else (*array.shape[:-1], columns)
