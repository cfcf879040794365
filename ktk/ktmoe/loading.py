"""Fills a layer, from the folder that weight_path names or from tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktk._core import Format
from ktk.backend import Backend
from ktk.config import MoEConfig
from ktk.dtypes import FLOAT_NAMES
from ktk.ktmoe.arguments import warn_once
from ktk.ktmoe.writers import Formats, described, method_of, stored_in
from ktk.moe import MoE
from ktk.names import KT_WRITTEN

if TYPE_CHECKING:
    from ktk.checkpoint.config import ExpertConfig

#: A loaded layer, and what its weights were before; None where nobody knows.
Loaded = tuple[MoE, Formats | None]


def as_list(order: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    """Return a map of slots as numbers."""
    if order is None:
        return None
    try:
        numbers = order.tolist() if isinstance(order, torch.Tensor) else order
        return [operator.index(number) for number in numbers]
    except TypeError:
        raise TypeError(
            f"physical_to_logical_map_cpu must have one integer for each slot, got {order!r}"
        ) from None


def load_from_path(
    path: str | Path,
    layer_idx: int,
    method: str,
    config: MoEConfig,
    experts: Sequence[int],
    order: Sequence[int] | None,
    *,
    activation: dict[str, Any],
    into: MoE | None = None,
    **options: Any,
) -> Loaded:
    """Load some slots of a layer of a checkpoint, which must have the sizes of `config`.

    They go into a new layer, or into one that was loaded from the same checkpoint. With an order
    there may be more slots than experts, for redundant copies. Floats become what `method`
    names, where its backend has several formats.
    """
    from ktk.checkpoint.detect import is_packed
    from ktk.checkpoint.open import open_checkpoint
    from ktk.loading.load import announce, load_layers
    from ktk.loading.plan import naming_layer, plan_layer

    with open_checkpoint(path) as checkpoint:
        with naming_layer(layer_idx):
            found = checkpoint.layer(layer_idx)
            own = found.config
            _check_sizes(path, config, own, mapped=order is not None)
            _check_activation(path, activation, own)
            if method.upper() in KT_WRITTEN and found.has_floats:
                options["weight_format"] = KT_WRITTEN[method.upper()][0]
            # With neither argument, the checkpoint's own activation function holds.
            more = {**activation, "zero_expert_num": own.zero_expert_num}
            layer = replace(config, **more) if activation else own.layer()
            layer = replace(layer, num_experts=config.num_experts)
            plan = plan_layer(checkpoint, layer_idx, method, experts, order, options, layer)
            _check_map(path, order, own.num_experts)
            formats = found.file_formats
            given = formats["gate"], formats["up"], formats["down"]
        announce(path, [plan])
        made = None if into is None else {layer_idx: into}
        loaded = load_layers(checkpoint, [plan], into=made)[layer_idx]
        return loaded, None if is_packed(path) else given


def load_from_tensors(
    backend: Backend,
    config: MoEConfig,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    experts: Sequence[int],
    order: Sequence[int] | None,
    **options: Any,
) -> Loaded:
    """Pack some slots of a layer from its stacked gate, up and down."""
    gate, up, down = map(_stack, ("gate_proj", "up_proj", "down_proj"), tensors)
    for name, stack in (("up_proj", up), ("down_proj", down)):
        if len(stack) != len(gate):
            raise ValueError(f"{name} has {len(stack)} experts, gate_proj has {len(gate)}")
    sources = range(len(gate)) if order is None else order
    if len(sources) != config.num_experts:
        raise ValueError(f"{len(sources)} experts are given for a layer of {config.num_experts}")
    for slot, expert in enumerate(sources):
        if not 0 <= expert < len(gate):
            raise ValueError(f"slot {slot} is to hold expert {expert} of {len(gate)}")
    _check_map("the tensors", order, len(gate))
    moe = MoE(backend, config, **options)
    wanted = set(experts)
    for slot, expert in enumerate(sources):
        if slot in wanted:
            moe.load_expert(slot, gate[expert], up[expert], down[expert])
        else:
            moe.leave_out(slot)
    elements = [FLOAT_NAMES.get(stack.dtype) for stack in (gate, up, down)]
    known = [Format(element) for element in elements if element]
    return moe, (known[0], known[1], known[2]) if len(known) == 3 else None


def _stack(name: str, given: Any) -> torch.Tensor:
    """Return an argument as a tensor of three dimensions in CPU memory."""
    try:
        # Not as_tensor() for a tensor: it would go to torch's default device.
        stack = given if isinstance(given, torch.Tensor) else torch.as_tensor(given, device="cpu")
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(f"{name} must be a tensor, got {type(given).__name__}") from None
    if stack.ndim != 3 or stack.device.type != "cpu":
        raise ValueError(
            f"{name} must have three dimensions, the first of experts, and be in CPU memory; got "
            f"{list(stack.shape)} on {stack.device}"
        )
    return stack


def check_method(method: str, moe: MoE) -> None:
    """Say that a file holds what another method stands for; calls are right all the same."""
    stored, method = stored_in(moe), method.upper()
    if stored is None or method not in KT_WRITTEN:
        return
    found = method_of(stored)
    if found != method:
        warn_once(
            f"method {method} means {KT_WRITTEN[method][0]}, but the weights are "
            + described(stored)
            + (f": method {found}" if found else "")
            + ". They are computed as they are; writing them for GPUs will be refused"
        )


def _check_sizes(path: str | Path, config: MoEConfig, own: ExpertConfig, *, mapped: bool) -> None:
    names = ("num_experts_per_tok", "hidden_size", "intermediate_size")
    for name in names if mapped else ("num_experts", *names):
        expected, found = getattr(config, name), getattr(own, name)
        if found != expected:
            raise ValueError(f"{path} has {name} {found}, the layer was made for {expected}")
    if config.zero_expert_num not in (0, own.zero_expert_num):
        raise ValueError(
            f"{path} has zero_expert_num {own.zero_expert_num}, the layer was made for "
            f"{config.zero_expert_num}"
        )


def _check_map(where: str | Path, order: Sequence[int] | None, experts: int) -> None:
    """Say which experts a map leaves out: nothing computes them."""
    missing = sorted(set(range(experts)) - set(order)) if order is not None else []
    if missing:
        warn_once(
            f"physical_to_logical_map_cpu puts {len(missing)} of the {experts} experts of {where} "
            f"into no slot, the first of them {missing[0]}"
        )


def _check_activation(path: str | Path, asked: dict[str, Any], own: ExpertConfig) -> None:
    """Say that swiglu_limit or swiglu_alpha are not what the checkpoint's configuration says."""
    if not asked:
        return
    limit, function = asked["activation_limit"], asked["activation"]
    plain = own.activation != "swigluoai"
    if limit != own.activation_limit or plain != (function == "silu"):
        warn_once(
            f"the layer was made with swiglu_limit {limit or 0} for {function}, which is obeyed; "
            f"{path} says {own.activation} with {own.activation_limit or 'no limit'}"
        )
