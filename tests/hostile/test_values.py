"""Values of the wrong type or size are named, with what was expected, wherever they stand."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import gguf_files
import mutants
import pytest
import sound
import torch
from safetensors.torch import load_file

import ktk
from ktk.checkpoint import entries
from ktk.checkpoint.config import read_config
from ktk.checkpoint.files import read_json
from ktk.checkpoint.packed import header as packed_header
from ktk.cli.contents import inspect
from ktk.conversion import convert
from ktk.errors import CheckpointError

LAYER = "layer-00000.safetensors"


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        ktk.Model.from_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    return message


def config(folder: Path, **changes: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**sound.CONFIG, **changes}))
    return folder


QUANTIZATION: tuple[tuple[Any, str], ...] = (
    ([1], "quantization_config is [1], expected an object"),
    ({"weight_block_size": 128}, "weight_block_size is 128, expected a list of 2"),
    ({"weight_block_size": [128]}, "weight_block_size is [128], expected a list of 2"),
    (
        {"weight_block_size": [0, 0]},
        "an item of weight_block_size is 0, expected an integer from 1",
    ),
    ({"weight_block_size": ["a", 1]}, "an item of weight_block_size is 'a', expected an integer"),
    ({"weight_block_size": [1e400, 1]}, "an item of weight_block_size is inf"),
    ({"weight_block_size": [10**30, 1]}, "an item of weight_block_size is 1000"),
    ({"bits": "4"}, "bits is '4', expected an integer from 1 to 64"),
    ({"group_size": [32]}, "group_size is [32], expected an integer from -1"),
    ({"quant_method": 3}, "quant_method is 3, expected a string"),
    ({"config_groups": [1]}, "config_groups is [1], expected an object"),
    ({"config_groups": {"g": 1}}, "g is 1, expected an object"),
    ({"config_groups": {"g": {"weights": 4}}}, "weights of g is 4, expected an object"),
)
ENTRIES: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"quantization_config": value}, message) for value, message in QUANTIZATION),
    ({"swiglu_limit": [7]}, "swiglu_limit is [7], expected a number"),
    ({"swiglu_limit": "7"}, "swiglu_limit is '7', expected a number"),
    ({"swiglu_limit": 1e400}, "swiglu_limit is inf, expected a number"),
    ({"swiglu_alpha": 10**400}, "swiglu_alpha is 1000"),
    ({"swiglu_limits": 4}, "swiglu_limits is 4, expected a list"),
    ({"hidden_act": ["silu"]}, "hidden_act is ['silu'], expected a string"),
    ({"model_type": None}, "model_type is None, expected a string"),
    ({"num_experts": True}, "num_experts is True, expected an integer from 1 to 16777216"),
    ({"num_experts_per_tok": 4}, "num_experts_per_tok is 4, but there are only 3 experts"),
    ({"hidden_size": 2**25}, "hidden_size is 33554432, expected an integer from 1 to 16777216"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1, expected an integer from 0"),
    ({"moe_intermediate_size": [8, "a"]}, "moe_intermediate_size is [8, 'a']; ktk reads models"),
)


@pytest.mark.parametrize(("changes", "message"), ENTRIES, ids=[text for _, text in ENTRIES])
def test_an_entry_of_config_json_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config(tmp_path, **changes))
    assert f"{tmp_path / 'config.json'}: {message}" in str(caught.value)


@pytest.mark.parametrize("model_type", ["muse_spark", "muse_spark_text"])
def test_a_family_is_refused_with_the_reason(tmp_path: Path, model_type: str) -> None:
    with pytest.raises(CheckpointError, match="normalises what an expert returns"):
        read_config(config(tmp_path, model_type="x", text_config={"model_type": model_type}))


def test_a_long_value_is_shown_in_part(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_config(config(tmp_path, num_experts=["x" * 10**5]))
    assert len(str(caught.value)) < 400
    with pytest.raises(entries.EntryError, match="is a huge number"):
        entries.integer("n", 10**5000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (mutants.nested(100_000), "its JSON is nested too deeply"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b"\xff\xfe{}", "it is no JSON"),
        (b"\xef\xbb\xbf{}", "it is no JSON"),
        (b'{"a": %s}' % (b"1" * 5000), "it is no JSON"),
        (b'{"a": "\\ud800"}', "it is no JSON"),
        (b"[1]", r"it is \[1\], expected an object"),
        (b"", "it is no JSON"),
    ],
    ids=["nested", "open", "UTF-16", "mark", "digits", "surrogate", "list", "empty"],
)
def test_json_that_is_none_is_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: {message}") as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_characters_beyond_sixteen_bits_are_welcome(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"a": "\U0001f600"}))
    assert "\\ud83d" in path.read_text()
    assert read_json(path) == {"a": "\U0001f600"}


def test_endless_json_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, expected no more than"):
        read_json(path)
    header = tmp_path / "m.safetensors"
    header.write_bytes((1 << 39).to_bytes(8, "little"))
    os.truncate(header, 1 << 40)
    path.write_text(json.dumps(sound.CONFIG))
    assert "its header claims 549755813888 bytes" in refusal(tmp_path)


# --- packed files -------------------------------------------------------------------------------


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    return sound.packed(tmp_path / "packed")


HEADERS: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("version",), "1", "version is '1', expected an integer"),
    (("backend",), None, "backend is None, expected a string"),
    (("layer",), -1, "layer is -1, expected an integer from 0 to 99999"),
    (("source",), 5, "source is 5, expected a string"),
    (("config",), [], "config is [], expected an object"),
    (
        ("config", "hidden_size"),
        "64",
        "hidden_size must be an integer from 1 to 16777216, got '64'",
    ),
    (("config", "num_experts"), 2**40, "num_experts must be an integer from 1 to 16777216, got"),
    (("config", "activation"), ["silu"], "activation is ['silu'], expected a string"),
    (
        ("config", "num_experts"),
        True,
        "num_experts must be an integer from 1 to 16777216, got True",
    ),
    (("config", "activation_limit"), "x", "activation_limit must be a positive number or None"),
    (("config", "clamp_gate_below"), 1, "clamp_gate_below must be a bool, got 1"),
    (("formats",), 3, "formats is 3, expected an object"),
    (("formats", "gate"), None, "gate is None, expected an object"),
    (("formats", "up", "element"), "zz", "the format of up is unknown: 'zz'"),
    (("formats", "up", "element"), "ggml:99", "the format of up is unknown"),
    (("formats", "down", "group_k"), -1, "group_k of down is -1, expected an integer"),
    (("biases",), "gate", "biases is 'gate', expected a list"),
    (("factors",), [["gate"]], "factors is [['gate']], expected some of gate, up, down"),
    (("xxh3",), [], "xxh3 is [], expected an object"),
    (("xxh3", "gate"), "0", "xxh3 of gate is no 3 checksums"),
    (("xxh3", "gate"), "g" * 48, "xxh3 of gate is no 3 checksums"),
    (("xxh3", "up"), None, "xxh3 of up is None, expected a string"),
)


@pytest.mark.parametrize(("place", "value", "message"), HEADERS, ids=[m for _, _, m in HEADERS])
def test_an_entry_of_a_packed_header_is_named(
    packed: Path, place: tuple[str, ...], value: Any, message: str
) -> None:
    """With a checksum that is right: somebody wrote it so."""
    path = packed / LAYER
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + size])
    header = json.loads(document["__metadata__"]["ktk"])
    inner = header
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    written = json.dumps(header)
    document["__metadata__"]["ktk"] = written
    document["__metadata__"]["ktk_xxh3"] = f"{packed_header.checksum(written.encode()):016x}"
    body = json.dumps(document).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + data[8 + size :])
    found = refusal(packed)
    assert f"{path} is damaged: in its header, {message}" in found
    assert "ktk convert --resume" in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [[0]]}, "an item of layers is [0], expected an integer from 0 to 99999"),
        ({"layers": ["a"]}, "an item of layers is 'a'"),
        ({"layers": [-1]}, "an item of layers is -1"),
        ({"layers": 3}, "layers is 3, expected a list"),
        ({"layers": list(range(20_000))}, "layers lists 20000, expected no more than 10000"),
        ({"backend": None}, "backend is None, expected a string"),
        ({"group_size": "32"}, "group_size is '32', expected an integer"),
    ],
    ids=["list", "text", "negative", "number", "many", "backend", "group_size"],
)
def test_an_entry_of_the_packed_index_is_named(
    packed: Path, changes: dict[str, Any], message: str
) -> None:
    path = packed / "ktk_packed.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    assert f"{path} is damaged: {message}" in refusal(packed)


def test_an_index_of_millions_of_layers_is_refused_at_once(packed: Path) -> None:
    path = packed / "ktk_packed.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "layers": list(range(2_000_000))}))
    started = time.process_time()
    with pytest.raises(CheckpointError, match="layers lists 2000000"):
        inspect(packed)
    assert time.process_time() - started < 2


def test_a_fifo_in_the_place_of_a_layer_does_not_hold_a_conversion_up(packed: Path) -> None:
    (packed / LAYER).unlink()
    os.mkfifo(packed / LAYER)
    source = packed.parent / "packed-source"
    with pytest.raises(CheckpointError, match=f"{packed / LAYER} is a FIFO, expected a file"):
        convert(source, packed, backend="AMXINT8", resume=True)


def test_a_fifo_among_the_files_of_a_source_does_not_hold_a_conversion_up(tmp_path: Path) -> None:
    """Also one that holds no layer that is asked for."""
    source = sound.safetensors(tmp_path / "source")
    index = source / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = "model-2.safetensors"
    index.write_text(json.dumps(document))
    os.mkfifo(source / "model-2.safetensors")
    with pytest.raises(CheckpointError, match=r"model-2.safetensors is a FIFO, expected a file"):
        convert(source, tmp_path / "out", backend="AMXINT8")


DIGITS = "9" * 5000


def test_a_layer_of_thousands_of_digits_is_none(tmp_path: Path) -> None:
    """Python makes no integer of that; no model has such a layer."""
    folder = sound.safetensors(tmp_path / "model")
    names = list(load_file(folder / "model-1.safetensors").items())
    more = {f"model.layers.{DIGITS}.mlp.experts.0.gate_proj.weight": torch.ones(2)}
    sound.safetensors(folder, {**dict(names), **more})
    assert ktk.Model.from_checkpoint(folder).layers == (0,)
    made = gguf_files.stacked(gguf_files.experts("Q4_0"))
    name = f"blk.{DIGITS}.ffn_gate_exps.weight"
    path = gguf_files.write(tmp_path / "m.gguf", {**made, name: made["blk.0.ffn_up_exps.weight"]})
    assert ktk.Model.from_checkpoint(path).layers == (0,)
