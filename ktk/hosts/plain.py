"""Tensors for which torch's dispatcher, which takes longer than a norm, need not be asked."""

from __future__ import annotations

import torch

_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def is_plain(x: torch.Tensor) -> bool:
    """Whether nobody but CPUs has to do with an operation on a tensor: no graph, trace or mode."""
    return (
        type(x) is torch.Tensor
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not (x.requires_grad and torch.is_grad_enabled())
        and not _modes()
    )


def is_constant(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether a weight has a dtype and lies in CPU memory, and nobody records its gradient."""
    return (
        weight.dtype == dtype
        and weight.is_cpu
        and not (weight.requires_grad and torch.is_grad_enabled())
    )
