"""What config.json says of experts is understood, wherever and however models say it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktk.checkpoint.config import ExpertConfig, read_config
from ktk.checkpoint.open import open_checkpoint
from ktk.config import MoEConfig
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
    with pytest.raises(CheckpointError, match="mlp_up_softcap is None, expected a number"):
        read(tmp_path, {**CONFIG, "mlp_gate_softcap": 4})


def test_situ_has_the_sizes_that_kimi_k3_says(tmp_path: Path) -> None:
    sizes = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25}
    layer = read(tmp_path, {**CONFIG, **sizes, "hidden_act": "situ"}).layer()
    assert (layer.activation, layer.gate_softcap, layer.up_softcap) == ("situ", 4.0, 25.0)
    # Checkpoints that are cut out of it for tests keep them beside another function.
    assert read(tmp_path, {**CONFIG, **sizes}).layer().activation == "silu"
    with pytest.raises(CheckpointError, match="activation_situ_beta is None, expected a number"):
        read(tmp_path, {**CONFIG, **sizes, "hidden_act": "situ", "activation_situ_beta": None})
    for beta in ({"activation_situ_beta": 4.0}, {**sizes, "activation_situ_linear_beta": None}):
        layer = read(tmp_path, {**CONFIG, **beta, "hidden_act": "situ"}).layer()
        assert (layer.activation, layer.gate_softcap, layer.up_softcap) == ("situ", 4.0, None)


@pytest.mark.parametrize("name", ["moe_latent_size", "routed_expert_hidden_size"])
def test_experts_may_be_narrower_than_their_model(tmp_path: Path, name: str) -> None:
    for narrow, hidden, outer in ((H // 2, H // 2, H), (None, H, None), (H, H, None)):
        config = read(tmp_path, {**CONFIG, name: narrow})
        assert (config.hidden_size, config.model_hidden_size) == (hidden, outer)


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


def test_entries_that_are_null_say_nothing(tmp_path: Path) -> None:
    """transformers writes all that a configuration has, also what nobody set."""
    said = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
    inner = {**CONFIG, "quantization_config": None, "num_hidden_layers": None}
    outer = {"quantization_config": said, "num_hidden_layers": 5, "hidden_size": 7}
    config = read(tmp_path, {**outer, "text_config": inner})
    assert (config.quantization.method, config.quantization.zero_offset) == ("gptq", 0)
    assert (config.num_layers, config.hidden_size) == (5, H)


def test_a_function_that_ktk_does_not_compute_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(
        CheckpointError, match=r"activation \(--activation\) must be one of .*'mish'"
    ):
        open_checkpoint(tmp_path, activation="mish")


def other(folder: Path, entries: dict[str, Any], activation: str) -> list[MoEConfig]:
    """Return two layers of a model whose user says the activation function."""
    (folder / "config.json").write_text(json.dumps({**CONFIG, **entries}))
    config = read_config(folder, activation=activation)
    return [config.of_layer(number).layer() for number in (0, 1)]


@pytest.mark.parametrize(
    "entries",
    [
        {"swiglu_limits": [7.0, 0]},
        {"swiglu_limit": 7.0},
        {"hidden_act": "swigluoai"},
        {"model_type": "gpt_oss"},
        {"swiglu_alpha": 1.5, "swiglu_limit": 6.0},
        {"mlp_gate_softcap": 4, "mlp_up_softcap": 25.0},
        {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        {"hidden_act": "situ"},
    ],
)
def test_limits_go_with_the_activation_that_they_are_of(
    tmp_path: Path, entries: dict[str, Any]
) -> None:
    plain = replace(read(tmp_path, CONFIG).layer(), activation="gelu")
    assert other(tmp_path, entries, "gelu") == [plain, plain]


def test_limits_stay_with_their_activation_under_another_name(tmp_path: Path) -> None:
    limits = {"swiglu_limits": [7.0, 0]}
    own = [read(tmp_path, {**CONFIG, **limits}).of_layer(number).layer() for number in (0, 1)]
    assert other(tmp_path, limits, "swish") == own
    assert [one.activation for one in own] == ["swiglustep", "silu"]
    # Clamped after SiLU, not before.
    (one, _) = other(tmp_path, {"swiglu_limit": 10.0}, "swiglustep")
    assert (one.activation, one.activation_limit) == ("swiglustep", 10.0)
    # What the name means that ktk does not know, the user says.
    (one, _) = other(tmp_path, {"hidden_act": "swiglu_new", "swiglu_limit": 10.0}, "silu")
    assert (one.activation, one.activation_limit) == ("silu", 10.0)
    sizes = {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25}
    (one, _) = other(tmp_path, sizes, "situ")
    assert (one.gate_softcap, one.up_softcap) == (4.0, 25.0)
    for nothing in ("", "mish"):
        with pytest.raises(CheckpointError, match=f"uses the activation '{nothing}'"):
            other(tmp_path, {}, nothing)


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
