"""Finds out which function of gate and up a module of experts computes: by asking the module."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ktk.config import MoEConfig
from ktk.testing.activations import ACTIVATIONS
from ktk.testing.reference import glu
from ktk.transformers.layout import Layout

Glu = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Formulas that are equal on paper are evaluated in another order of operations: some ten roundings,
# each of at most half an epsilon of what is added up.
_EPSILONS = 16 * torch.finfo(torch.float32).eps
# Beyond all limits of clamps, and exact in f32.
_FAR = 2.0**13
# Of clamps: what is on or off.
_OPTIONS = [
    one.name for one in dataclasses.fields(MoEConfig) if one.type == "bool" and one.name != "gated"
]


def activation_of(module: Any, layout: Layout) -> dict[str, Any] | None:
    """Return the fields of `ktk.MoEConfig` that say what a module does with gate and up.

    Parameters
    ----------
    module
        Its method `_apply_gate` takes both in one tensor. Without a gate, its `act_fn` takes up.
    layout
        Says where in that tensor they are.

    Returns
    -------
    dict or None
        None: ktk has no such function, or the module cannot be asked.
    """

    def asked(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        joined = layout.join_last(gate, up)
        result: torch.Tensor = module._apply_gate(joined[None])[0]
        return result

    gate = torch.linspace(-40, 40, 641, dtype=torch.float32, device="cpu")
    if not layout.gated:
        return _of_up(module.act_fn, gate)
    up = torch.cat([gate[::5].flip(0) / 3, gate[::2] / 2 + 0.125, gate])[: len(gate)].roll(217)
    try:
        with torch.no_grad():
            answer = asked(gate, up)
            if answer.shape != gate.shape:
                return None
            for fields in _guesses(asked):
                expected = _formula(gate, up, **fields)
                bound = _EPSILONS * (gate.abs() * (up.abs() + 1) + expected.abs())
                if bool(((answer - expected).abs() <= bound).all()):
                    return fields
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError):
        pass  # weights of its own, say, which are not there yet
    return None


def _of_up(
    asked: Callable[[torch.Tensor], torch.Tensor], up: torch.Tensor
) -> dict[str, Any] | None:
    """Return the fields for experts without a gate, whose function has no constants."""
    try:
        with torch.no_grad():
            answer = asked(up)
    except (NotImplementedError, RuntimeError, TypeError, ValueError):
        return None
    for name, function in ACTIVATIONS.items():
        if any(function.cases) or answer.shape != up.shape:
            continue
        expected = _formula(None, up, activation=name, gated=False)
        if bool(((answer - expected).abs() <= _EPSILONS * (up.abs() + expected.abs())).all()):
            return {"activation": name}
    return None


def _guesses(asked: Glu) -> Iterator[dict[str, Any]]:
    """Yield what the module might compute, with the constants that some of its answers mean."""
    # Models are made with other defaults of dtype and device than torch's own.
    zero, one, far = (
        torch.tensor([x], dtype=torch.float32, device="cpu") for x in (0.0, 1.0, _FAR)
    )
    slope = float(asked(one, zero))  # sigmoid(alpha), where up is given an offset of 1
    constants: dict[str, Any] = {}
    if 0 < slope < 1:
        constants["activation_alpha"] = _number(math.log(slope / (1 - slope)))
    for name, function in ACTIVATIONS.items():
        fields = {"activation": name, **constants}
        if any(function.cases):
            caps = _softcaps(asked, one, far)
            if caps is not None:
                # First without the one of up: a cap as large as `_FAR` would pass for it.
                yield {**fields, "gate_softcap": caps["gate_softcap"]}
                yield {**fields, **caps}
            continue
        yield fields
        unit = float(_formula(one, zero + 1, **fields)) - float(_formula(one, zero, **fields))
        offset = float(_formula(one, zero, **fields))
        limit = _number((float(asked(one, far)) - offset) / unit)  # what is left of a large up
        if 0 < limit < _FAR:
            clamped = {**fields, "activation_limit": limit}
            yield clamped
            yield from ({**clamped, option: True} for option in _OPTIONS)


def _softcaps(asked: Glu, one: torch.Tensor, far: torch.Tensor) -> dict[str, float] | None:
    """Return the caps a and b of ``a tanh(g / a) sigmoid(g) * b tanh(u / b)``, were it that."""
    most, least = float(asked(far, far)), float(asked(one, far))  # a b, and the gate's part of 1
    part = least / most * (1 + math.exp(-1)) if most > 0 else 0.0
    if not 0 < part < 1:
        return None
    a = _number(1 / math.atanh(part))
    return {"gate_softcap": a, "up_softcap": _number(most / a)}


def _number(value: float) -> float:
    """Return a constant without what f32 made of its last digits."""
    return float(f"{value:.5g}")


def _formula(gate: torch.Tensor | None, up: torch.Tensor, **fields: Any) -> torch.Tensor:
    """Compute what `ktk.MoEConfig` says that ktk computes."""
    config = MoEConfig(
        num_experts=1, num_experts_per_tok=1, hidden_size=32, intermediate_size=32, **fields
    )
    first = None if gate is None else gate.double().numpy()
    return torch.from_numpy(glu(first, up.double().numpy(), config))
