"""Finds the modules of a model that hold experts, and what ktk can do with each."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ktk.config import MoEConfig
from ktk.transformers.activation import activation_of
from ktk.transformers.layout import Layout, is_experts
from ktk.transformers.packed import leave_alone, packed_of
from ktk.transformers.ties import tied_experts
from ktk.transformers.unmarked import mark

_log = logging.getLogger("ktk.transformers")
_LAYER = re.compile(r"(?P<stack>.*?)(?:^|\.)layers\.(?P<number>\d+)\.")
# How configurations of models call k, the most usual name first.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
_said: set[str] = set()


@dataclass(frozen=True)
class Experts:
    """A module of experts that ktk can compute.

    Attributes
    ----------
    name
        Of the module in its model.
    module
        Of a class of transformers.
    layout
        Of its tensors.
    config
        Sizes, with k as the model's configuration has it, and the activation.
    """

    name: str
    module: Any
    layout: Layout
    config: MoEConfig


def experts_of(model: torch.nn.Module) -> list[Experts]:
    """Return the modules with experts that ktk can compute and has not packed yet.

    Modules that it cannot compute are left to transformers, which a warning says once. Of modules
    that have the same weights there is one (`ties`).
    """
    mark()
    found, other = [], []
    tied = tied_experts(model)
    for name, module in model.named_modules():
        if not is_experts(module) or packed_of(module) is not None or name in tied:
            continue
        described = describe(name, module)
        if described is None:
            leave_alone(module)
            other.append(type(module).__name__)
        else:
            found.append(described)
    for kind, count in Counter(other).items():
        say_once(
            f"{count} layers of experts are {kind}, whose function of gate and up ktk does not "
            "have: transformers computes them"
        )
    return found


def describe(name: str, module: Any) -> Experts | None:
    """Return what a module of experts computes; None if ktk does not compute that."""
    layout = Layout.of(module)
    if layout is None or not all(hasattr(module, tensor) for tensor in layout.names):
        return None
    fields = activation_of(module, layout)
    if fields is None:
        return None
    fields |= layout.sizes(module) | {"num_experts_per_tok": top_k_of(module)}
    return Experts(name, module, layout, MoEConfig(**fields))


def by_layer(experts: Iterable[Experts]) -> dict[int, Experts]:
    """Return experts by the numbers of layers in files.

    Where a model has several stacks of layers (one that predicts further tokens, say), these are
    of the stack with the most experts. Two modules in one layer have no number.
    """
    stacks: dict[str, list[tuple[int, Experts]]] = {}
    for one in experts:
        if match := _LAYER.match(one.name):
            stacks.setdefault(match["stack"], []).append((int(match["number"]), one))
    stack = max(stacks.values(), key=len, default=[])
    count = Counter(number for number, _ in stack)
    return {number: one for number, one in stack if count[number] == 1}


def say_once(sentence: str) -> None:
    """Log a warning that is the same for all models, or all layers, once."""
    if sentence not in _said:
        _said.add(sentence)
        _log.warning("%s", sentence)


def top_k_of(module: Any) -> int:
    """Return k as the model's configuration has it; calls may name another."""
    for name in _TOP_K:
        value = getattr(getattr(module, "config", None), name, None)
        if isinstance(value, int) and 0 < value <= module.num_experts:
            return value
    return 1
