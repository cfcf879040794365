"""What a module does with gate and up is what it answers, whatever it is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from ktk.transformers.activation import activation_of
from ktk.transformers.layout import Layout

HALVES = Layout(transposed=False, interleaved=False, has_bias=False)
PAIRS = Layout(transposed=True, interleaved=True, has_bias=True)


def oai(alpha: float, limit: float | None, one: float = 1.0) -> Any:
    def apply(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + one)

    return apply


def clamped(limit: float, below: bool = False) -> Any:
    lowest = -limit if below else None
    return lambda gate, up: F.silu(gate.clamp(lowest, limit)) * up.clamp(-limit, limit)


KNOWN: dict[str, tuple[Any, dict[str, Any]]] = {
    "silu": (lambda g, u: F.silu(g) * u, {"activation": "silu"}),
    "silu of transformers": (lambda g, u: ACT2FN["silu"](g) * u, {"activation": "silu"}),
    "silu written out": (lambda g, u: u * g / (1 + (-g).exp()), {"activation": "silu"}),
    "in double": (lambda g, u: (F.silu(g.double()) * u).float(), {"activation": "silu"}),
    "clamped": (clamped(10.0), {"activation": "silu", "activation_limit": 10.0}),
    "clamped below": (
        clamped(7.0, below=True),
        {"activation": "silu", "activation_limit": 7.0, "clamp_gate_below": True},
    ),
    "gelu": (lambda g, u: ACT2FN["gelu_pytorch_tanh"](g) * u, {"activation": "gelu_tanh"}),
    "gelu_new": (lambda g, u: ACT2FN["gelu_new"](g) * u, {"activation": "gelu_tanh"}),
    "exact gelu": (lambda g, u: F.gelu(g) * u, {"activation": "gelu"}),
    "relu": (lambda g, u: F.relu(g) * u, {"activation": "relu"}),
    "relu2": (lambda g, u: F.relu(g).square() * u, {"activation": "relu2"}),
    "clamped afterwards": (
        lambda g, u: F.silu(g).clamp(max=7) * u.clamp(-7, 7),
        {"activation": "swiglustep", "activation_limit": 7.0},
    ),
    "soft caps": (
        lambda g, u: 9 * torch.tanh(g / 9) * torch.sigmoid(g) * 20 * torch.tanh(u / 20),
        {"activation": "situ", "gate_softcap": 9.0, "up_softcap": 20.0},
    ),
    "a soft cap of gate alone": (
        lambda g, u: 9 * torch.tanh(g / 9) * torch.sigmoid(g) * u,
        {"activation": "situ", "gate_softcap": 9.0},
    ),
    "gpt-oss": (
        oai(1.702, 7.0),
        {"activation": "swigluoai", "activation_alpha": 1.702, "activation_limit": 7.0},
    ),
    "another slope": (
        oai(1.25, None),
        {"activation": "swigluoai", "activation_alpha": 1.25},
    ),
}
UNKNOWN: dict[str, Any] = {
    "relu and a step": lambda g, u: F.relu(g).clamp(min=0.01) * u,
    "mish": lambda g, u: F.mish(g) * u,
    "gate and up the other way round": lambda g, u: F.silu(u) * g,
    "clamped at both ends afterwards": lambda g, u: (F.silu(g) * u).clamp(-7, 7),
    "no one beside up": oai(1.702, 7.0, one=0.5),
    "limits that differ": lambda g, u: F.silu(g.clamp(max=7)) * u.clamp(-9, 9),
    "a scale": lambda g, u: 1.001 * F.silu(g) * u,
    "of another shape": lambda g, u: torch.cat([g, u]),
    "an error": lambda g, u: g.no_such_method(),
}


def module(apply: Any, layout: Layout) -> Any:
    def apply_gate(joined: torch.Tensor) -> torch.Tensor:
        if layout.interleaved:
            return cast(torch.Tensor, apply(joined[..., ::2], joined[..., 1::2]))
        return cast(torch.Tensor, apply(*joined.chunk(2, dim=-1)))

    return SimpleNamespace(_apply_gate=apply_gate)


@pytest.mark.parametrize("layout", [HALVES, PAIRS], ids=["halves", "pairs"])
@pytest.mark.parametrize("name", KNOWN)
def test_known_functions(name: str, layout: Layout) -> None:
    apply, expected = KNOWN[name]
    assert activation_of(module(apply, layout), layout) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_functions_that_ktk_has_not(name: str) -> None:
    assert activation_of(module(UNKNOWN[name], HALVES), HALVES) is None


def test_a_layout_that_is_not_the_one_of_the_flags() -> None:
    assert activation_of(module(KNOWN["silu"][0], PAIRS), HALVES) is None


def test_defaults_of_the_surroundings_do_not_matter() -> None:
    apply, expected = KNOWN["gpt-oss"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            assert activation_of(module(apply, PAIRS), PAIRS) == expected
    finally:
        torch.set_default_dtype(before)
