"""Experts are found by the shape of their names, under any prefix and in any module."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

import ktk
from ktk.checkpoint import describe, verify
from ktk.checkpoint.nearest import nearest
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.checkpoint.safetensors.locations import Locations
from ktk.cli import app
from ktk.conversion.convert import convert
from ktk.errors import CheckpointError

E, K, H, I = 3, 2, 32, 16  # noqa: E741 - the names the table uses
SIZES = {"E": E, "H": H, "I": I, "2I": 2 * I, "I2": 2 * I}
CONFIG: dict[str, Any] = {
    "model_type": "any_moe",
    "num_experts": E,
    "num_experts_per_tok": K,
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_hidden_layers": 9,
}
# What ktk listed before it looked for shapes of names: prefixes, and names behind them with axes.
LISTED_PREFIXES = (
    *("model.layers.{L}.", "model.language_model.layers.{L}."),
    *("language_model.model.layers.{L}.", "thinker.model.layers.{L}.", "backbone.layers.{L}."),
    *("language_model.model.blocks.{L}.", "layers.{L}."),
)
TRIPLE, WS = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


def each(where: str, gate: str, up: str, down: str) -> dict[str, tuple[str, str]]:
    return {
        "gate": (f"{where}.{{e}}.{gate}.weight", "I H"),
        "up": (f"{where}.{{e}}.{up}.weight", "I H"),
        "down": (f"{where}.{{e}}.{down}.weight", "H I"),
    }


def both(gate_up: str, axes: str, down: str, down_axes: str) -> dict[str, tuple[str, str]]:
    return {"gate_up": (gate_up, axes), "down": (down, down_axes)}


STRAIGHT, TURNED = ("E 2I H", "E H I"), ("E H 2I", "E I H")
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
LISTED: dict[str, tuple[dict[str, tuple[str, str]], str]] = {
    "per-expert": (each("mlp.experts", *TRIPLE), ""),
    "mixtral": (each("block_sparse_moe.experts", *WS), ""),
    "deepseek-v4": (each("ffn.experts", *WS), ""),
    "mistral": (each("experts", *WS), ""),
    "jamba": (each("feed_forward.experts", *TRIPLE), ""),
    "lfm2": (each("feed_forward.experts", *WS), ""),
    "gpt-oss": (
        {
            **both(FUSED[0], "E H I2", FUSED[1], "E I H"),
            "gate_up_bias": ("mlp.experts.gate_up_proj_bias", "E I2"),
            "down_bias": ("mlp.experts.down_proj_bias", "E H"),
        },
        "gpt_oss",
    ),
    "fused": (both(FUSED[0], STRAIGHT[0], FUSED[1], STRAIGHT[1]), ""),
    "fused-transposed": (both(FUSED[0], TURNED[0], FUSED[1], TURNED[1]), ""),
    "granite": (
        both(
            *("block_sparse_moe.input_linear.weight", STRAIGHT[0]),
            *("block_sparse_moe.output_linear.weight", STRAIGHT[1]),
        ),
        "",
    ),
    "gemma4": (both("experts.gate_up_proj", STRAIGHT[0], "experts.down_proj", STRAIGHT[1]), ""),
    "llama4": (
        both(
            *("feed_forward.experts.gate_up_proj", TURNED[0]),
            *("feed_forward.experts.down_proj", TURNED[1]),
        ),
        "llama4",
    ),
    "aria": (both("mlp.experts.fc1.weight", TURNED[0], "mlp.experts.fc2.weight", TURNED[1]), ""),
    "nemotron": (
        {
            "up": ("mixer.experts.{e}.up_proj.weight", "I H"),
            "down": ("mixer.experts.{e}.down_proj.weight", "H I"),
        },
        "nemotron_h",
    ),
    "nemotron-fused": (
        {"up": ("mixer.experts.up_proj", "E I H"), "down": ("mixer.experts.down_proj", "E H I")},
        "nemotron_h",
    ),
}


def experts(prefix: str) -> dict[str, torch.Tensor]:
    """Random experts named as most are, with everything before `experts` in the prefix."""
    generator = torch.Generator().manual_seed(sum(map(ord, prefix)))
    return {
        f"{prefix}experts.{e}.{name}.weight": torch.randn(shape, generator=generator).bfloat16()
        for e in range(E)
        for name, shape in zip(TRIPLE, ((I, H), (I, H), (H, I)), strict=True)
    }


def write(
    folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("prefix", LISTED_PREFIXES)
@pytest.mark.parametrize("name", LISTED)
def test_what_was_listed_is_found_with_the_same_results(
    name: str, prefix: str, tmp_path: Path
) -> None:
    parts, model_type = LISTED[name]
    before = prefix.format(L=7)
    tensors = {
        before + one.format(e=e): torch.rand([SIZES[axis] for axis in axes.split()]).bfloat16()
        for one, axes in parts.values()
        for e in range(E if "{e}" in one else 1)
    }
    write(tmp_path, tensors, CONFIG | {"model_type": model_type or "any_moe"})
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.layers() == [7]
        names = checkpoint.layer(7).names
    assert names.family.parts.keys() == parts.keys()
    for part, (one, axes) in parts.items():
        assert names.family.parts[part].axes == axes
        for e in range(E):
            assert names.name(part, e) == before + one.format(e=e)


# Words that mean something else where they stand are tested below.
WORD = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True).filter(
    lambda word: (
        not re.search(
            r"^(experts?|moe|layers?|blocks?|h|blk|mtp|nextn|next_n|eagle|draft|talker|code_predictor|"
            r"vi[ts]|image|img|video|audio|speech)|shared|share_|att",
            word,
        )
    )
)
PATH = st.lists(WORD, max_size=3).map(lambda words: "".join(f"{word}." for word in words))
LAYERS = st.one_of(st.sampled_from(["layers", "layer", "blocks", "block", "h", "blk"]), WORD)


@given(PATH, LAYERS, st.integers(0, 200), PATH)
def test_any_prefix_and_any_module_will_do(
    before: str, layers: str, number: int, module: str
) -> None:
    prefix = f"{before}{layers}.{number}.{module}"
    known = ["experts.{e}.gate_proj.weight"]
    beside = [f"{before}{layers}.{number}.{module}gate.weight", f"{before}norm.weight", "lm_head"]
    locations = Locations(Path("m"), [*beside, *experts(prefix)], known, None)
    assert locations.numbers() == [number]
    found = locations.of_layer(number)
    assert found is not None
    assert found.prefix == prefix


@pytest.mark.parametrize("prefix", ["a.b.c.layers.3.x.y.", "net.3.", "stages.0.layers.3.moe_ff."])
def test_what_is_found_is_computed(prefix: str, tmp_path: Path) -> None:
    weights = experts(prefix)
    write(tmp_path, weights)
    moe = ktk.MoE.from_checkpoint(tmp_path, 3, "BF16")
    gate, up, down = (
        torch.stack([weights[f"{prefix}experts.{e}.{name}.weight"] for e in range(E)])
        for name in TRIPLE
    )
    x, ids, w = torch.rand(4, H), torch.tensor([[0, 2]] * 4), torch.rand(4, K)
    wanted = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=K, hidden_size=H, intermediate_size=I
    )
    assert torch.equal(moe(x, ids, w), wanted.load(gate, up, down)(x, ids, w))


BESIDE = (
    *("mtp.layers.0.mlp.", "model.mtp.layers.0.block.mlp.", "mtp.0.ffn.", "vision_tower.blocks.0."),
    *("model.visual.layers.0.mlp.", "talker.model.layers.0.mlp.", "model.layers.0.mlp.vision_moe."),
    "model.layers.0.mtp_block.mlp.",
)


@pytest.mark.parametrize("prefix", BESIDE)
def test_the_language_model_comes_before_what_is_beside_it(prefix: str, tmp_path: Path) -> None:
    write(tmp_path, {**experts("model.layers.1.mlp."), **experts(prefix)})
    assert describe(tmp_path).layers == (1,)
    if "layers.0." in prefix:  # and in one layer
        write(tmp_path, {**experts("model.layers.0.mlp."), **experts(prefix)})
        with SafetensorsCheckpoint(tmp_path) as checkpoint:
            assert checkpoint.layer(0).names.prefix == "model.layers.0.mlp."
    # Where there is nothing else, it is what is meant.
    write(tmp_path, experts(prefix))
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.layer(0).names.prefix == prefix


@pytest.mark.parametrize("word", ["shared_experts.", "self_attn.", "self_attention.", "share_moe."])
def test_shared_experts_and_attention_are_never_meant(word: str, tmp_path: Path) -> None:
    write(tmp_path, experts(f"model.layers.0.{word}"))
    with pytest.raises(CheckpointError, match="has no experts that ktk knows by name; it has"):
        describe(tmp_path)
    write(tmp_path, {**experts("model.layers.0.mlp."), **experts(f"model.layers.0.{word}")})
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.layer(0).names.prefix == "model.layers.0.mlp."


def test_two_places_are_an_error_that_names_both(tmp_path: Path) -> None:
    both_of = {**experts("model.encoder.layers.0.ffn."), **experts("model.decoder.layers.0.ffn.")}
    write(tmp_path, both_of)
    with pytest.raises(CheckpointError) as caught:
        ktk.MoE.from_checkpoint(tmp_path, 0)
    assert str(caught.value).endswith(
        f"{tmp_path} has experts of layer 0 under model.decoder.layers.0.ffn. and under "
        "model.encoder.layers.0.ffn.: say which are meant, by module='decoder' or module='encoder'"
    )
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        assert checkpoint.layers() == [0]
    for module in ("encoder", "decoder", "model.encoder", "encoder.layers"):
        with SafetensorsCheckpoint(tmp_path, module) as checkpoint:
            assert f".{module}." in f".{checkpoint.layer(0).names.prefix}"
    with pytest.raises(CheckpointError, match=r"in a module 'coder' in layer 0; it has model\.dec"):
        ktk.MoE.from_checkpoint(tmp_path, 0, module="coder")


def test_a_place_inside_another_one_has_a_name(tmp_path: Path) -> None:
    write(tmp_path, {**experts("model.layers.0."), **experts("model.layers.0.inner.")})
    with pytest.raises(CheckpointError, match=r"by module='layers\.0' or|module='inner'"):
        ktk.MoE.from_checkpoint(tmp_path, 0)


# Qwen3-Omni: both parts have experts, of other sizes.
OMNI: dict[str, Any] = {
    "model_type": "qwen3_omni_moe",
    "thinker_config": {"text_config": CONFIG | {"model_type": "thinker_text"}},
    "talker_config": {
        "text_config": CONFIG
        | {"model_type": "talker_text", "num_experts": 2, "num_experts_per_tok": 1}
    },
}


@pytest.fixture
def omni(tmp_path: Path) -> Path:
    talker = experts("talker.model.layers.0.mlp.")
    tensors = {name: one for name, one in talker.items() if ".experts.2." not in name}
    folder = tmp_path / "omni"
    folder.mkdir()
    return write(folder, tensors | experts("thinker.model.layers.0.mlp."), OMNI)


def test_a_module_has_sizes_of_its_own(omni: Path) -> None:
    thinker, talker = describe(omni), describe(omni, module="talker")
    assert (thinker.config.model_type, thinker.config.num_experts) == ("thinker_text", 3)
    assert (talker.config.model_type, talker.config.num_experts) == ("talker_text", 2)
    whole = ktk.Model.from_checkpoint(omni, module="talker")
    assert whole[0].config.num_experts == 2
    assert ktk.MoE.from_checkpoint(omni, 0).config.num_experts == 3
    x = torch.rand(3, H)
    one = ktk.MoE.from_checkpoint(omni, 0, module="talker")
    ids, w = torch.tensor([[0], [1], [0]]), torch.ones(3, 1)
    assert torch.equal(whole[0](x, ids, w), one(x, ids, w))


def test_a_module_is_looked_at_read_and_converted(omni: Path, tmp_path: Path) -> None:
    assert verify(omni, module="talker").experts == 2
    convert(omni, tmp_path / "talker", backend="BF16", module="talker")
    assert ktk.Model.from_checkpoint(tmp_path / "talker")[0].config.num_experts == 2
    with pytest.raises(CheckpointError, match="begun from"):
        convert(omni, tmp_path / "talker", backend="BF16", module="thinker", resume=True)
    with pytest.raises(CheckpointError, match="module= is for folders of safetensors files"):
        ktk.Model.from_checkpoint(tmp_path / "talker", module="talker")


def test_the_commands_take_a_module(omni: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    shown = run(app, ["inspect", str(omni), "--json", "--module", "talker"])
    assert json.loads(shown.stdout)["layers"][0]["num_experts"] == 2
    read = run(app, ["verify", str(omni), "--json", "--module", "talker"])
    assert json.loads(read.stdout)["experts"] == 2
    out = str(tmp_path / "out")
    made = run(app, ["convert", str(omni), out, "--backend", "BF16", "--module", "talker"])
    assert made.exit_code == 0
    assert describe(out).config.num_experts == 2
    refused = run(app, ["convert", str(omni), out, "--to", "int4", "--module", "talker"])
    assert "--to converts the language model" in refused.output


def test_biases_are_found_beside_matrices(tmp_path: Path) -> None:
    prefix = "model.layers.0.mlp."
    biases = {f"{prefix}experts.{e}.down_proj.bias": torch.rand(H).bfloat16() for e in range(E)}
    write(tmp_path, experts(prefix) | biases)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(0)
        for e in range(E):
            found = layer.expert(e).arrays()
            assert torch.equal(found["down_bias"], biases[f"{prefix}experts.{e}.down_proj.bias"])
            assert not found.keys() & {"gate_bias", "up_bias"}


NEAR = {
    # Experts in the layer, then in others, then feed-forward layers, then whatever there is.
    "model.layers.2.moe.w_a.weight": "model.layers.2.moe.w_a.weight",
    "model.layers.5.moe.w_a.weight": "model.layers.*.moe.w_a.weight",
    "model.layers.2.mlp.up_proj.weight": "model.layers.2.mlp.up_proj.weight",
    "decoder.5.ffn.w.weight": "decoder.*.ffn.w.weight",
    "model.layers.2.norm.weight": "model.layers.2.norm.weight".replace("2", "*"),
    "embedding.weight": "embedding.weight",
}


@pytest.mark.parametrize("name", NEAR)
def test_the_names_that_come_nearest_are_always_shown(name: str, tmp_path: Path) -> None:
    write(tmp_path, {name: torch.zeros(2, 2)})
    for number in (2, 0):
        with (
            SafetensorsCheckpoint(tmp_path) as checkpoint,
            pytest.raises(CheckpointError, match=f"in layer {number}; it has ") as caught,
        ):
            checkpoint.layer(number)
        shown = NEAR[name] if number == 2 else re.sub(r"\b\d+\b", "*", name)
        assert str(caught.value).endswith(f"it has {shown}")
    says = f"; it has {re.escape(shown)}$"  # of layer 0, where each number is a star
    with SafetensorsCheckpoint(tmp_path) as checkpoint, pytest.raises(CheckpointError, match=says):
        checkpoint.layers()


def test_names_of_experts_come_before_others() -> None:
    names = ["a.layers.0.mlp.x", "a.layers.1.experts.0.x", "a.layers.1.mlp.x", "b"]
    assert nearest(names, 1) == ["a.layers.1.experts.*.x"]
    assert nearest(names, 0) == ["a.layers.0.mlp.x"]
    assert nearest(names, None) == ["a.layers.*.experts.*.x"]
