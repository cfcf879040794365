"""Adds adapters to the experts of a model, takes them off, and merges them into weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ktk.lora import Lora
from ktk.names import PREFERRED
from ktk.sft.merging import can_merge, merge_into
from ktk.sft.peft_layers import join, take_off
from ktk.transformers import adapter
from ktk.transformers.packed import Packed, packed_modules

#: Matrices of an expert that factors can be beside.
TARGETS = ("gate", "up", "down")
# What keeps sums as floats.
FLOATS = PREFERRED["bf16"][0]


def add_lora(
    model: torch.nn.Module,
    rank: int = 8,
    alpha: float = 16,
    targets: Sequence[str] = TARGETS,
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
    alpha : float
    targets : sequence of str
        Which of gate, up and down.
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
    ValueError
        The model has no packed experts, or has an adapter; or an argument means nothing.
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    wanted = tuple(targets)
    unknown = [name for name in wanted if name not in TARGETS]
    if unknown or not wanted:
        raise ValueError(f"targets must be some of {', '.join(TARGETS)}, got {wanted!r}")
    found = []
    modules = packed_experts(model)
    for name, module, packed in modules:
        if adapter.lora_of(module) is not None:
            raise ValueError(f"{name} has an adapter: merge it, or remove it by remove_lora(model)")
        c = packed.moe.config
        e, h, i = c.num_experts, c.hidden_size, c.intermediate_size
        factors = {}
        if "gate" in wanted and not c.gated:
            raise ValueError(f"the experts of {name} have no gate: targets are up and down")
        for part in wanted:
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
        Experts are packed as codes, which a merge would have to quantize again.
    """
    adapted = [one for one in packed_experts(model) if adapter.lora_of(one[1]) is not None]
    for name, _, packed in adapted:
        if not can_merge(packed):
            raise ValueError(
                f"{name} is packed for {packed.moe.backend.name}, in codes that sums would be "
                f"rounded to: save the adapter, load the model for {FLOATS}, and merge there"
            )
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
    found = [(name, modules[name], packed) for name, packed in packed_modules(model).items()]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts that ktk has packed: load it with "
            'experts_implementation="ktk", or call ktk.transformers.pack(model)'
        )
    return found
