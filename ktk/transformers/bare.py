"""Whether a module is nothing but its forward, so that what it would compute may be computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

#: Whether somebody wants to be asked whichever module is called.
any_global_hook: Callable[[], bool] = getattr(
    torch.nn.modules.module, "_has_any_global_hook", lambda: False
)


def are_bare(modules: Iterable[nn.Module]) -> bool:
    """Tell whether nobody wants to be asked when one of these is called: no hooks.

    Parameters
    ----------
    modules
        Whose `__call__` is to be left out.
    """
    return not any_global_hook() and not any(
        module._forward_pre_hooks or module._forward_hooks or "forward" in module.__dict__
        for module in modules
    )
