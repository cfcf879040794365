"""What config.json says of experts is understood, wherever and however models say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.errors import CheckpointError

from .test_checkpoint import CONFIG, H, I, K


def read(folder: Path, entries: dict[str, Any]) -> ExpertConfig:
    (folder / "config.json").write_text(json.dumps(entries))
    return read_config(folder)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ({}, ("silu", None, 1.702)),
        ({"hidden_act": "swish"}, ("silu", None, 1.702)),
        ({"hidden_act": "gelu_pytorch_tanh"}, ("gelu_tanh", None, 1.702)),
        ({"hidden_act": "gelu_new"}, ("gelu_tanh", None, 1.702)),
        ({"swiglu_limit": 10}, ("silu", 10.0, 1.702)),
        ({"expert_swiglu_limit_list": [0, 0]}, ("silu", None, 1.702)),
        ({"model_type": "gpt_oss"}, ("swigluoai", 7.0, 1.702)),
        ({"swiglu_alpha": 1.5, "swiglu_limit": 6.0}, ("swigluoai", 6.0, 1.5)),
    ],
)
def test_activation_follows_the_configuration(
    tmp_path: Path, entries: dict[str, Any], expected: tuple[object, ...]
) -> None:
    layer = read(tmp_path, {**CONFIG, **entries}).layer()
    assert (layer.activation, layer.activation_limit, layer.activation_alpha) == expected


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("muse_spark", "normalises what an expert returns"),
    ],
)
def test_experts_of_another_kind_are_refused_by_name(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    with pytest.raises(CheckpointError, match=f"model type '{model_type}' {reason}"):
        read(tmp_path, {**CONFIG, "model_type": model_type})


@pytest.mark.parametrize("key", ["expert_swiglu_limit_list", "swiglu_limits"])
def test_limits_of_layers_clamp_what_silu_returns(tmp_path: Path, key: str) -> None:
    config = read(tmp_path, {**CONFIG, key: [0, None, 4.0]})
    of_layers = [config.of_layer(number).layer() for number in range(4)]
    assert [one.activation for one in of_layers] == ["silu", "silu", "swiglustep", "silu"]
    assert [one.activation_limit for one in of_layers] == [None, None, 4.0, None]


def test_softcaps_are_those_of_the_configuration(tmp_path: Path) -> None:
    layer = read(tmp_path, {**CONFIG, "mlp_gate_softcap": 4, "mlp_up_softcap": 25.0}).layer()
    assert (layer.activation, layer.gate_softcap, layer.up_softcap) == ("situ", 4.0, 25.0)


def test_situ_has_the_sizes_that_kimi_k3_says(tmp_path: Path) -> None:
    sizes = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25}
    layer = read(tmp_path, {**CONFIG, **sizes, "hidden_act": "situ"}).layer()
    assert (layer.activation, layer.gate_softcap, layer.up_softcap) == ("situ", 4.0, 25.0)
    # Checkpoints that are cut out of it for tests keep them beside another function.
    assert read(tmp_path, {**CONFIG, **sizes}).layer().activation == "silu"
    for name in sizes:
        with pytest.raises(CheckpointError, match=f"{name} is None, expected a number"):
            read(tmp_path, {**CONFIG, **sizes, "hidden_act": "situ", name: None})


@pytest.mark.parametrize("name", ["moe_latent_size", "routed_expert_hidden_size"])
def test_experts_may_be_narrower_than_their_model(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, {**CONFIG, name: H // 2}).hidden_size == H // 2
    assert read(tmp_path, {**CONFIG, name: None}).hidden_size == H


@pytest.mark.parametrize(
    ("entries", "name"),
    [
        ({"hidden_act": "mish"}, "mish"),
    ],
)
def test_an_unknown_activation_is_named_and_can_be_replaced(
    tmp_path: Path, entries: dict[str, Any], name: str
) -> None:
    config = read(tmp_path, {**CONFIG, **entries})
    with pytest.raises(CheckpointError, match=rf"'{name}'.*gelu_tanh.*silu"):
        config.layer()
    known = replace(read(tmp_path, CONFIG).layer(), activation="gelu_tanh")
    assert config.layer(known) == known


@pytest.mark.parametrize(
    "path", [("text_config",), ("thinker_config", "text_config"), ("language_config",)]
)
def test_sizes_of_the_language_model_are_found_where_it_is(
    tmp_path: Path, path: tuple[str, ...]
) -> None:
    inner = {**CONFIG, "num_hidden_layers": 5}
    for name in reversed(path):
        inner = {"model_type": "some_vl", "hidden_size": 7, name: inner}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    config = read_config(tmp_path)
    assert (config.hidden_size, config.model_type, config.num_layers) == (H, "qwen3_moe", 5)


def test_a_list_with_an_entry_per_layer_is_one_number(tmp_path: Path) -> None:
    """As in Hunyuan-A13B."""
    lists = {"moe_intermediate_size": [I, I, I], "num_experts_per_tok": None, "moe_topk": [K] * 3}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **lists}))
    config = read_config(tmp_path)
    assert (config.intermediate_size, config.num_experts_per_tok) == (I, K)
    lists["moe_intermediate_size"] = [I, I + 1]
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **lists}))
    with pytest.raises(CheckpointError, match=r"moe_intermediate_size is \[12, 13\].*all alike"):
        read_config(tmp_path)
