"""What transformers calls for experts_implementation="ktk"."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, ExpertsInterface

from ktk.transformers.adapter import active_lora
from ktk.transformers.modules import describe, say_once
from ktk.transformers.packed import Packed, leave_alone, packed_of
from ktk.transformers.packing import DEFAULT_BACKEND, pack_module, say_moved

IMPLEMENTATION = "ktk"
# Transformers' own default, for modules that ktk does not compute.
_STOCK = "grouped_mm"


def experts_forward(
    self: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    adapter_names: Any = None,
) -> torch.Tensor:
    """Compute a module's experts: packed if they are, or can be now, and else as transformers does.

    Parameters
    ----------
    hidden_states : tensor [tokens, hidden_size]
    top_k_index : tensor of integers [tokens, k]
        Numbers from num_experts on name zero experts, if the module has such, or experts of other
        processes, which contribute nothing.
    top_k_weights : tensor [tokens, k]
    adapter_names : sequence of str, optional
        What PEFT gives where each example of a batch has an adapter of its own. That is refused.
    """
    if adapter_names is not None:
        raise ValueError(
            "adapter_names choose an adapter for each example, and adapters of experts are the "
            "same for all of a batch: call the model for each of them"
        )
    packed = packed_of(self)
    if packed is None:
        packed = _at_first_call(self)
    if isinstance(packed, Packed):
        return packed(hidden_states, top_k_index, top_k_weights, active_lora(self))
    return _stock(self, hidden_states, top_k_index, top_k_weights)


def _at_first_call(module: Any) -> Packed | bool:
    """Pack a module that no loading and nobody else packed; False if transformers computes it."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "experts are to be packed before a model is compiled: call ktk.transformers.pack(model)"
        )
    kind = type(module).__name__
    found = describe(kind, module)
    if found is None:
        say_once(
            f"{kind} has a function of gate and up that ktk does not have: transformers computes it"
        )
    elif hasattr(module, "_hf_hook"):  # accelerate moves its tensors in and out
        say_moved(kind)
    else:
        say_once(
            f"experts are packed for {DEFAULT_BACKEND} at the first call: call "
            "ktk.transformers.pack(model, backend) before, or load the model with ktk, which needs "
            "less memory"
        )
        if module.training and torch.is_grad_enabled() and _is_trained(module):
            say_once(
                f"weights of {kind} are packed, and not trained any more: ktk.sft.add_lora(model) "
                'trains adapters of them, and experts_implementation="grouped_mm" the weights'
            )
        return pack_module(found)
    leave_alone(module)
    return False


def _is_trained(module: Any) -> bool:
    return any(one.requires_grad for one in module.parameters(recurse=False))


def _stock(self: Any, *call: torch.Tensor) -> torch.Tensor:
    stock = ALL_EXPERTS_FUNCTIONS.get(_STOCK)
    stock = functools.partial(stock or type(self).forward.__wrapped__, self)
    result: torch.Tensor = stock(*call)
    return result


ExpertsInterface.register(IMPLEMENTATION, experts_forward)
