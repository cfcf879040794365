"""Adds adapters to the experts of a model, takes them off, and merges them into weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from ktk.lora import Lora
from ktk.names import PREFERRED
from ktk.sft.arguments import (
    checked_alpha,
    checked_dtype,
    checked_rank,
    checked_switch,
    checked_targets,
)
from ktk.sft.merging import can_merge, check_finite, merge_into
from ktk.sft.peft_layers import join, take_off
from ktk.sft.sharded import leave_parts
from ktk.transformers import adapter
from ktk.transformers.packed import Packed, packed_modules

# What keeps sums as floats.
FLOATS = PREFERRED["bf16"][0]


def add_lora(
    model: torch.nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Iterable[str] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    keep_products: bool = True,
) -> list[torch.nn.Parameter]:
    """Put factors of low rank beside the packed experts of a model.

    An expert's matrix W then acts as ``W + alpha / rank * B @ A``: A is drawn as torch draws a
    dense layer, B is zeros, so that the model computes what it did. The factors are parameters
    ``{gate,up,down}_lora_{a,b}`` of each module of experts, [experts, rank, columns] and
    [experts, rows, rank], and require gradients; no other parameter is changed. PEFT switches them
    off and on with its own adapters, whether :func:`peft.get_peft_model` was called before or is
    called later.

    Parameters
    ----------
    model : torch.nn.Module
        With experts that ktk has packed: loaded with ``experts_implementation="ktk"``, or packed by
        :func:`ktk.transformers.pack`.
    rank : int
        At least 1.
    alpha : float
        Finite.
    targets : sequence of str, optional
        Which of gate, up and down; by default all that the experts have.
    dtype : torch.dtype
        Of the factors: float32, bfloat16 or float16. Their gradients are summed in f32 in any case.
    keep_products : bool
        Keep the products of gate and up between the passes: 4 bytes times the intermediate size for
        each token and expert that it names. Without them, backward passes compute them again.

    Returns
    -------
    list of Parameter
        All factors, in the order of the model's modules.

    Raises
    ------
    TypeError
        An argument is of another kind: a rank that is no integer, a string of targets.
    ValueError
        The model has no packed experts, or has an adapter; or an argument means nothing.
    """
    rank, alpha, dtype = checked_rank(rank), checked_alpha(alpha), checked_dtype(dtype)
    keep_products = checked_switch("keep_products", keep_products)
    wanted = checked_targets(targets)
    modules = packed_experts(model)
    for name, module, packed in modules:
        if adapter.lora_of(module) is not None:
            raise ValueError(f"{name} has an adapter: merge it, or remove it by remove_lora(model)")
        if "gate" in (wanted or ()) and not packed.moe.config.gated:
            raise ValueError(f"the experts of {name} have no gate: targets are up and down")
    found = []
    for _, module, packed in modules:
        c = packed.moe.config
        e, h, i = c.num_experts, c.hidden_size, c.intermediate_size
        factors = {}
        for part in wanted or c.parts:
            rows, columns = (h, i) if part == "down" else (i, h)
            a = torch.empty(e, rank, columns, dtype=dtype, device="cpu")
            bound = 1 / math.sqrt(columns)
            factors[f"{part}_a"] = torch.nn.init.uniform_(a, -bound, bound)
            factors[f"{part}_b"] = torch.zeros(e, rows, rank, dtype=dtype, device="cpu")
        adapter.put_lora(module, Lora(**factors, scale=alpha / rank))
        packed.keeps_products = keep_products
        found += [getattr(module, adapter.parameter_of(factor)) for factor in factors]
    join(model, [module for _, module, _ in modules])
    return found


@contextlib.contextmanager
def without_lora(model: torch.nn.Module) -> Iterator[None]:
    """Compute a model without the adapters of its experts, as long as the block runs.

    ::

        with ktk.sft.without_lora(model), torch.no_grad():
            reference = model(ids).logits       # [batch, tokens, vocabulary]

    Blocks may be inside each other, and inside those of :meth:`peft.PeftModel.disable_adapter`,
    which does the same to adapters of experts and of PEFT. Factors stay as they are, and so does
    what they require. A pass that is recorded has its backward pass in the block as well, if
    checkpointing computes it again there.

    Parameters
    ----------
    model : torch.nn.Module
        Or one that PEFT has wrapped.

    Raises
    ------
    ValueError
        The model has no packed experts.
    """
    with adapter.switched_off([module for _, module, _ in packed_experts(model)]):
        yield


def remove_lora(model: torch.nn.Module) -> None:
    """Take the adapters off all experts of a model."""
    for module in model.modules():
        take_off(module)


def merge(model: torch.nn.Module) -> torch.nn.Module:
    """Add the adapters of experts to their weights, and take them off.

    One module of experts after the other is packed anew: memory for one more is needed, and what
    interrupts a merge leaves modules that are done and modules that are as they were.

    Parameters
    ----------
    model : torch.nn.Module
        Its experts are packed as floats; sums are rounded to what they are stored as.

    Returns
    -------
    torch.nn.Module
        `model`, which :meth:`save_pretrained` can save.

    Raises
    ------
    ValueError
        Experts are packed as codes, which a merge would have to quantize again; or factors, or
        sums of weights and factors, are not finite. The model is as it was.
    """
    leave_parts(model)
    adapted = [one for one in packed_experts(model) if adapter.lora_of(one[1]) is not None]
    for name, module, packed in adapted:
        if not can_merge(packed):
            raise ValueError(
                f"{name} is packed for {packed.moe.backend.name}, in codes that sums would be "
                f"rounded to: save the adapter, load the model for {FLOATS}, and merge there"
            )
        check_finite(module, packed)
    for _, module, packed in adapted:
        merge_into(module, packed)
        take_off(module)
    return model


def packed_experts(model: torch.nn.Module) -> list[tuple[str, Any, Packed]]:
    """Return the modules of packed experts with their names.

    Raises
    ------
    ValueError
        There are none.
    """
    modules = dict(model.named_modules())
    found = [
        (name, modules[name], packed)
        for name, packed in packed_modules(model).items()
        if "original_module" not in name.split(".")  # of which PEFT calls a copy
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that ktk has packed: load it with "
            'experts_implementation="ktk", or call ktk.transformers.pack(model)'
        )
    return found
