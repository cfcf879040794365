"""Factors of low rank on modules of experts: ordinary parameters beside what is packed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ktk.lora import FACTORS, Lora

#: What an adapter's factors are multiplied with, on each module.
SCALE = "ktk_lora_scale"
# In how many blocks of `switched_off` a module is.
_OFF = "ktk_lora_off"


def parameter_of(factor: str) -> str:
    """Return what a module calls a factor of `ktk.Lora`: gate_lora_a for gate_a."""
    part, _, side = factor.rpartition("_")
    return f"{part}_lora_{side}"


def lora_of(module: Any) -> Lora | None:
    """Return the adapter of a module of experts, of its own parameters; None if it has none."""
    scale = getattr(module, SCALE, None)
    if scale is None:
        return None
    names = {factor: parameter_of(factor) for factor in FACTORS}
    found = {
        factor: getattr(module, name) for factor, name in names.items() if hasattr(module, name)
    }
    return Lora(**found, scale=scale)


def active_lora(module: Any) -> Lora | None:
    """Return the adapter that a module of experts is computed with at the moment."""
    off = getattr(module, _OFF, 0) or getattr(module, "ktk_peft_off", False)
    return None if off else lora_of(module)


@contextlib.contextmanager
def switched_off(modules: Sequence[Any]) -> Iterator[None]:
    """Compute modules of experts without their adapters; blocks may be inside each other."""
    for module in modules:
        setattr(module, _OFF, getattr(module, _OFF, 0) + 1)
    try:
        yield
    finally:
        for module in modules:
            setattr(module, _OFF, getattr(module, _OFF) - 1)


def has_lora(model: torch.nn.Module) -> bool:
    """Tell whether any experts of a model have an adapter."""
    return any(hasattr(module, SCALE) for module in model.modules())


def trained_state(model: torch.nn.Module, state: Any = None) -> dict[str, torch.Tensor]:
    """Return what of a model's tensors, or of `state`, requires gradients."""
    names = {name for name, one in model.named_parameters() if one.requires_grad}
    tensors = model.state_dict() if state is None else state
    return {name: value for name, value in tensors.items() if name in names}


def put_lora(module: Any, lora: Lora) -> None:
    """Give a module of experts parameters of an adapter, in the place of those that it has.

    Parameters of the same shape and dtype stay, with other values: optimizers know them.
    """
    old = {factor: module._parameters.get(parameter_of(factor)) for factor in FACTORS}
    remove_lora(module)
    for factor, value in lora.factors():
        parameter = old[factor]
        if parameter is None or (parameter.shape, parameter.dtype) != (value.shape, value.dtype):
            parameter = torch.nn.Parameter(value.detach())
        else:
            parameter.data.copy_(_spread_as(parameter, value.detach()))
        module.register_parameter(parameter_of(factor), parameter)
    setattr(module, SCALE, float(lora.scale))


def _spread_as(parameter: Any, value: torch.Tensor) -> torch.Tensor:
    """Return of a value what a rank has of a parameter that `fully_shard` has divided."""
    if not hasattr(parameter, "full_tensor"):
        return value
    from torch.distributed.tensor import distribute_tensor

    # Each rank has all of the value, so that none has to send it.
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)


def remove_lora(module: Any) -> None:
    """Take the adapter off a module of experts, if it has one."""
    for factor in FACTORS:
        module._parameters.pop(parameter_of(factor), None)
    if hasattr(module, SCALE):
        delattr(module, SCALE)
