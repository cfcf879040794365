"""Adds adapters to the experts of a model, takes them off, and merges them into weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ktk.config import PARTS
from ktk.lora import Lora
from ktk.names import PREFERRED
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
    [experts, rows, rank], and require gradients; no other parameter is changed. Call it after
    :func:`peft.get_peft_model`, which freezes all parameters that are not PEFT's.

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
    for name, module, packed in packed_experts(model):
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
    return found


def remove_lora(model: torch.nn.Module) -> None:
    """Take the adapters off all experts of a model."""
    for module in model.modules():
        adapter.remove_lora(module)


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
        if packed.dtype is None:
            raise ValueError(
                f"{name} is packed for {packed.moe.backend.name}, in codes that sums would be "
                f"rounded to: save the adapter, load the model for {FLOATS}, and merge there"
            )
    for _, module, packed in adapted:
        lora = adapter.lora_of(module)
        assert lora is not None
        assert packed.dtype is not None
        factors = {name: value.detach().float() for name, value in lora.factors()}
        for expert in range(packed.moe.config.num_experts):
            weights: dict[str, Any] = {}
            for part, unpacked in zip(PARTS, packed.moe.unpack_expert(expert), strict=True):
                if unpacked is None:
                    continue
                value = torch.from_numpy(unpacked)
                if f"{part}_a" in factors:
                    a, b = factors[f"{part}_a"][expert], factors[f"{part}_b"][expert]
                    value = value.addmm(b, a, alpha=lora.scale)
                weights[part] = value.to(packed.dtype)
            biases: dict[str, Any] = {
                name: one.contiguous() for name, one in packed.layout.biases(module, expert).items()
            }
            packed.moe.load_expert(expert, **weights, **biases)
        adapter.remove_lora(module)
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
