"""What the conformance kit draws."""

from __future__ import annotations

import runpy
from typing import Any

import pytest

import ktk
from ktk import config


def test_every_activation_function_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    names = (*config.ACTIVATIONS, "one_more")
    monkeypatch.setattr(config, "ACTIVATIONS", names)
    drawn = runpy.run_module("ktk.testing.strategies", alter_sys=True)["ACTIVATIONS"]
    assert {options["activation"] for options in drawn} == set(names)


def test_what_is_drawn_is_what_a_layer_takes() -> None:
    from ktk.testing.strategies import ACTIVATIONS

    sizes: dict[str, Any] = dict.fromkeys(
        ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size"), 1
    )
    made = [ktk.MoEConfig(**sizes, **options) for options in ACTIVATIONS]
    assert {layer.activation for layer in made} == set(config.ACTIVATIONS)
    assert any(layer.activation_limit is not None for layer in made)
    assert any(layer.activation_limit is None for layer in made)
