"""Torch's threads: one for a step of one token, where ktk computes all that is large."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import nn

from ktk.transformers.layout import is_experts
from ktk.transformers.packed import Packed, packed_of

# Numbers of a weight, and tokens that attention looks back on, for which more threads pay.
_LARGE, _LONG = 1 << 21, 1024


class FewThreads:
    """A context manager in which steps of one token have one thread of torch.

    Waking the others takes longer than what they would do, and they disturb the workers of ktk.
    Prompts have all threads, as has a model of which torch computes more than small things.

    Parameters
    ----------
    model
        Of transformers.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._hook: Any = None
        self._threads = 0

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        # Where a GPU has the model, torch computes nothing here.
        here = self._model.device.type == "cpu"
        if here and self._threads > 1 and not torch_computes_much(self._model):
            self._hook = self._model.register_forward_pre_hook(self._before, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()
            torch.set_num_threads(self._threads)

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        cache = kwargs.get("past_key_values")
        behind = 0 if cache is None else int(cache.get_seq_length())
        few = ids is not None and ids.numel() == 1 and behind < _LONG
        torch.set_num_threads(1 if few else self._threads)


def torch_computes_much(model: nn.Module) -> bool:
    """Whether a token reads weights of which torch would use more than one thread."""
    for module in model.modules():
        packed = isinstance(packed_of(module), Packed)
        if is_experts(module) and not packed:
            return True
        embedding = isinstance(module, nn.Embedding)  # of which a token reads a row
        for one in module._parameters.values():
            if type(one) is not nn.Parameter or one.is_cuda:
                continue
            if one.numel() >= _LARGE and not embedding:
                return True
    return False
