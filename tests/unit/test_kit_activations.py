"""Activation functions as the kit's reference has them."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk.config import ACTIVATIONS
from ktk.testing import reference
from ktk.testing.activations import ACTIVATIONS as KNOWN
from ktk.testing.activations import OPTIONS


def layer_of(**activation: Any) -> ktk.MoEConfig:
    return ktk.MoEConfig(
        num_experts=3, num_experts_per_tok=2, hidden_size=64, intermediate_size=32, **activation
    )


def test_the_reference_knows_all_activations_and_no_other() -> None:
    """And it has the same values with bounds and without."""
    x = np.linspace(-3, 3, 8)
    assert KNOWN.keys() == set(ACTIVATIONS)
    for activation, options in itertools.product(ACTIVATIONS, OPTIONS):
        for case in KNOWN[activation].cases:
            layer = layer_of(activation=activation, **options, **case)
            exact = reference.Uncertain(x, np.zeros(8))
            bounded = reference.bounded_glu(exact, exact, layer)
            np.testing.assert_allclose(reference.glu(x, x, layer), bounded.value, rtol=1e-12)
    with pytest.raises(ValueError, match="does not know the activation 'mish'"):
        reference.glu(x, x, SimpleNamespace(activation="mish"))  # type: ignore[arg-type]


def test_slopes_of_the_reference_are_its_derivatives() -> None:
    x, step = np.linspace(-6, 6, 96), 1e-6
    cases = [(name, case) for name, function in KNOWN.items() for case in function.cases]
    for activation, case in cases:
        function = KNOWN[activation]
        layer = layer_of(activation=activation, **case)
        for factor in (function.gate, function.up):
            ends = [factor.value(x + sign * step, layer) for sign in (1, -1)]
            quotient = (ends[0] - ends[1]) / (2 * step)
            # Its rounding, and a cubic term that no function here has more than 4 of.
            np.testing.assert_allclose(factor.slope(x, layer), quotient, atol=1e-8)
            assert (np.abs(factor.slope(x, layer)) <= factor.steepest(np.abs(x), layer)).all()


def test_the_reference_is_what_torch_computes() -> None:
    x = torch.linspace(-3, 3, 8, dtype=torch.float64)
    gates = {
        "silu": torch.nn.functional.silu(x) * x,
        "swigluoai": x * torch.sigmoid(1.702 * x) * (x + 1),
        "gelu_tanh": torch.nn.functional.gelu(x, approximate="tanh") * x,
        "gelu": torch.nn.functional.gelu(x) * x,
        "relu": torch.relu(x) * x,
        "relu2": torch.relu(x).square() * x,
        "swiglustep": torch.nn.functional.silu(x).clamp(max=1.5) * x.clamp(-1.5, 1.5),
        "situ": 7 * torch.tanh(x / 7) * torch.sigmoid(x) * 3.5 * torch.tanh(x / 3.5),
    }
    assert gates.keys() == set(ACTIVATIONS)
    fields = {name: function.cases[0] for name, function in KNOWN.items()}
    fields["swiglustep"] = {"activation_limit": 1.5}
    wanted = [(name, fields[name], expected) for name, expected in gates.items()]
    wanted.append(("situ", {"gate_softcap": 7.0}, 7 * torch.tanh(x / 7) * torch.sigmoid(x) * x))
    for activation, own, expected in wanted:
        layer = layer_of(activation=activation, **own)
        got = reference.glu(x.numpy(), x.numpy(), layer)
        np.testing.assert_allclose(got, expected.numpy(), rtol=1e-12)


def test_formulas_name_their_sources() -> None:
    places = r"https://arxiv\.org/abs/\d{4}\.\d{5}|(transformers|vllm)/[\w/]+\.py"
    for name, function in KNOWN.items():
        assert re.match(rf"({places}): \w+", function.source), name
