"""What was converted computes what the checkpoint computes, bit by bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import checkpoints as made
import gguf_files
import numpy as np
import pytest
import torch
from checkpoints import BLOCKS, GROUPS, MX, NV, ROWS, outputs, same_weights
from gguf import GGMLQuantizationType
from safetensors.torch import load_file

import ktk
from ktk import Format
from ktk.checkpoint import describe, open_checkpoint
from ktk.checkpoint.packed.header import from_metadata, to_bytes
from ktk.cli.contents import inspect
from ktk.conversion import Conversion, convert
from ktk.errors import CheckpointFormatError

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
FAMILIES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "qwen3": (
        "Qwen3MoeForCausalLM",
        1,
        {"num_experts": 4, "moe_intermediate_size": 96, "head_dim": 32},
    ),
    "mixtral": ("MixtralForCausalLM", 0, {"num_local_experts": 4, "intermediate_size": 96}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        1,
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 96,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "nemotron-h": (
        "NemotronHForCausalLM",
        1,
        {
            "n_routed_experts": 4,
            "moe_intermediate_size": 96,
            "head_dim": 32,
            "layers_block_type": ["full_attention", "moe"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        1,
        {"num_local_experts": 4, "intermediate_size": 96, "head_dim": 32},
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model that transformers wrote, and one of its layers."""
    name, layer, extra = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    of_class = getattr(transformers, name)
    torch.manual_seed(0)
    model = of_class(of_class.config_class(**COMMON, **extra))
    for parameter in model.parameters():
        # Biases are zero in a new model, and would not be missed.
        torch.nn.init.normal_(parameter, std=0.1)
    model.bfloat16().save_pretrained(folder)
    return folder, layer


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8", "AMXINT4"])
def test_families_compute_the_same(family: Any, backend: str, tmp_path: Path) -> None:
    source, layer = family
    convert(source, tmp_path, backend=backend)
    packed = ktk.MoE.from_checkpoint(tmp_path, layer)
    direct = ktk.MoE.from_checkpoint(source, layer, backend)
    assert packed.backend.name == backend
    assert packed.config == direct.config
    assert torch.equal(outputs(packed), outputs(direct))


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8", "AMXINT4"])
def test_a_file_loads_into_any_number_of_shards(backend: str, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    convert(source, tmp_path / "packed", backend=backend)
    one, two = (ktk.MoE.from_checkpoint(tmp_path / "packed", 0, shards=n) for n in (1, 2))
    assert (one.shards, two.shards) == (1, 2)
    assert same_weights(one, two)
    if backend != "AMXINT8":  # which gives each shard of down a scale of its own when it quantises
        direct = ktk.MoE.from_checkpoint(source, 0, backend, shards=2)
        assert torch.equal(outputs(two), outputs(direct))


@pytest.mark.parametrize(
    ("fmt", "backend"),
    [
        (BLOCKS, "FP8"),
        (ROWS, "AMXINT8"),
        (GROUPS, "AMXINT4"),
        (GROUPS, "RAWINT4"),
        (MX, "MXFP4"),
        (NV, "NVFP4"),
    ],
    ids=str,
)
def test_what_a_backend_stores_is_kept_as_it_is(fmt: Format, backend: str, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", fmt)
    [plan] = convert(source, tmp_path / "packed", backend=backend)
    assert plan.encoder.how == "stored as they are"
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE.from_checkpoint(source, 0, backend)
    assert packed.format == direct.format
    assert same_weights(packed, direct)
    assert torch.equal(outputs(packed), outputs(direct))


@pytest.mark.parametrize("fmt", [BLOCKS, GROUPS, MX, NV], ids=str)
def test_what_a_backend_does_not_take_is_decoded_and_quantized(fmt: Format, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", fmt)
    [plan] = convert(source, tmp_path / "packed", backend="AMXINT8")
    assert plan.encoder.how == "decoded to f32 and quantised by AMXINT8"
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE(packed.backend, packed.config)
    with ktk.checkpoint.open_checkpoint(source) as checkpoint:
        layer = checkpoint.layer(0)
        for expert in range(made.E):
            direct.load_expert(expert, layer.values(expert, torch.float32))
    assert same_weights(packed, direct)


@pytest.mark.parametrize("backend", ["FP8", "MXFP4", "RAWINT4"])
def test_floats_become_codes_for_backends_that_take_only_those(
    backend: str, tmp_path: Path
) -> None:
    [plan] = convert(made.write(tmp_path / "source"), tmp_path / "packed", backend=backend)
    assert plan.encoder.how == "decoded to f32 and quantised by ktk.quantize"
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    assert packed.backend.name == backend
    for part, stored in zip(made.PARTS, packed.unpack_expert(1), strict=True):
        meant = made.weight(part, 0, 1)
        want = ktk.quantize.quantize(meant, plan.encoder.layout.formats[part]).dequantize()
        assert torch.equal(torch.from_numpy(stored), want)


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_groups_are_as_asked_for(group: int, tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    [plan] = convert(source, tmp_path / "packed", backend="AMXINT4", group_size=group)
    fmt = Format("u4", "bf16", "none", 1, group)
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE.from_checkpoint(source, 0, "AMXINT4", weight_format=fmt)
    assert plan.encoder.layout.formats["down"] == fmt
    assert same_weights(packed, direct)


def test_groups_that_are_not_there_are_refused(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    with pytest.raises(CheckpointFormatError, match=r"no groups of 48, but 0 \(rows\), 32, 64"):
        convert(source, tmp_path / "packed", backend="AMXINT4", group_size=48)
    assert not (tmp_path / "packed").exists()


def test_other_groups_of_codes_are_made_anew(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", GROUPS)
    [plan] = convert(source, tmp_path / "packed", backend="AMXINT4", group_size=128)
    assert plan.encoder.how == "decoded to f32 and quantised by AMXINT4"
    assert plan.encoder.layout.formats["gate"].group_k == 128


@pytest.mark.parametrize("types", [("Q8_0", "Q8_0"), ("BF16", "Q4_0")])
def test_gguf_is_converted(types: tuple[str, str], tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    experts = gguf_files.experts(types[0], down=types[1])
    gguf_files.write(source, gguf_files.stacked(experts))
    convert(source, tmp_path / "packed", backend="AMXINT8")
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE.from_checkpoint(source, 0, "AMXINT8")
    assert packed.config == direct.config
    assert torch.equal(outputs(packed), outputs(direct))


def test_blocks_of_gguf_are_kept_as_they_are(tmp_path: Path) -> None:
    """Each part in its own type."""
    if not ktk.backends()["LLAMAFILE"].built:
        pytest.skip("no backend takes blocks here")
    source = tmp_path / "model.gguf"
    experts = gguf_files.experts("Q8_0", down="Q4_0")
    gguf_files.write(source, gguf_files.stacked(experts))
    [plan] = convert(source, tmp_path / "packed", backend="LLAMAFILE")
    assert plan.encoder.how == "stored as they are"
    assert [fmt.element for fmt in plan.encoder.layout.formats.values()] == ["q8_0", "q8_0", "q4_0"]
    for shards in (1, 2):
        packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0, shards=shards)
        direct = ktk.MoE.from_checkpoint(source, 0, "LLAMAFILE", shards=shards)
        assert packed.backend.name == "LLAMAFILE"
        assert torch.equal(outputs(packed), outputs(direct))


def test_blocks_are_decoded_for_who_does_not_take_them(tmp_path: Path) -> None:
    if not ktk.backends()["LLAMAFILE"].built:
        pytest.skip("no backend takes blocks here")
    source = tmp_path / "model.gguf"
    experts = gguf_files.experts("Q8_0", "Q4_1", "Q5_0", bias=True)
    gguf_files.write(source, gguf_files.stacked(experts))
    convert(source, tmp_path / "packed", backend="LLAMAFILE")
    convert(tmp_path / "packed", tmp_path / "again", backend="AMXINT8")
    again, once = (ktk.MoE.from_checkpoint(p, 0, "AMXINT8") for p in (tmp_path / "again", source))
    assert same_weights(again, once)
    assert torch.equal(outputs(again), outputs(once))


def test_factors_of_matrices_are_kept_beside_blocks(tmp_path: Path) -> None:
    """The converters for NVFP4 write them."""
    if not ktk.backends()["LLAMAFILE"].built:
        pytest.skip("no backend takes blocks here")
    experts = gguf_files.experts("Q8_0", "Q5_1", "Q5_0", bias=True)
    factors = np.linspace(0.25, 0.5, gguf_files.E, dtype=np.float32)
    for part in ("gate", "down"):
        experts[f"{part}_scale"] = gguf_files.Tensor(factors, GGMLQuantizationType.F32)
    source = gguf_files.write(tmp_path / "model.gguf", gguf_files.stacked(experts))
    [plan] = convert(source, tmp_path / "packed", backend="LLAMAFILE")
    assert plan.encoder.how == "stored as they are"
    assert plan.encoder.layout.factors == ("gate", "down")
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    direct = ktk.MoE.from_checkpoint(source, 0, "LLAMAFILE")
    assert torch.equal(outputs(packed), outputs(direct))
    convert(tmp_path / "packed", tmp_path / "again", backend="AMXINT8")
    again, once = (ktk.MoE.from_checkpoint(p, 0, "AMXINT8") for p in (tmp_path / "again", source))
    assert same_weights(again, once)


def test_blocks_are_not_made_of_floats(tmp_path: Path) -> None:
    """What is no block of ggml stays floats, and the command says so."""
    if not ktk.backends()["LLAMAFILE"].built:
        pytest.skip("no backend takes blocks here")
    source = made.write(tmp_path / "source", BLOCKS)
    [plan] = convert(source, tmp_path / "packed", backend="LLAMAFILE")
    assert plan.encoder.how == "decoded to f32"
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    with open_checkpoint(source) as checkpoint:
        meant = checkpoint.layer(0).values(1, torch.float32).arrays()
    for part, found in zip(made.PARTS, packed.unpack_expert(1), strict=True):
        assert torch.equal(torch.from_numpy(found), meant[part])
    with pytest.raises(CheckpointFormatError, match="LLAMAFILE has no groups of 32, but none"):
        convert(source, tmp_path / "groups", backend="LLAMAFILE", group_size=32)


def test_a_header_has_every_field_of_a_layer(tmp_path: Path) -> None:
    """An option that a packed file forgot would be another layer when the file is loaded."""
    source = made.write(tmp_path / "source")
    with Conversion(source, tmp_path / "packed", backend="AMXINT8") as conversion:
        header = conversion.plans[0].header
    options: dict[str, Any] = {
        "activation": "situ",
        "activation_limit": 3.5,
        "activation_alpha": 1.25,
        "clamp_gate_below": True,
        "gate_softcap": 4.0,
        "up_softcap": 25.0,
        "gated": False,
        "apply_router_weight_on_input": True,
        "zero_expert_num": 2,
    }
    for field in dataclasses.fields(ktk.MoEConfig):
        assert field.default is dataclasses.MISSING or options[field.name] != field.default
    width = 2 * header.layout.config.hidden_size
    config = dataclasses.replace(header.layout.config, **options, model_hidden_size=width)
    layout = dataclasses.replace(header.layout, config=config)
    written = to_bytes(dataclasses.replace(header, layout=layout))
    read = from_metadata(json.loads(written[8:])["__metadata__"])
    assert read.layout.config.layer() == config.layer()
    assert read.layout.config.model_hidden_size == width


def test_a_conversion_holds_few_experts(tmp_path: Path) -> None:
    """Memory of the process, mapped files left out: the layer is 50 MB as bf16, 25 converted."""
    source = made.write(tmp_path / "source", sizes=(32, 256, 1024))
    with Conversion(source, tmp_path / "packed", backend="AMXINT8", threads=2) as conversion:
        [plan] = conversion.plans
        before = _own_memory()
        most = max(_own_memory() for _ in conversion.run())
    expert = plan.nbytes // 32
    assert plan.nbytes > 22e6
    # Two experts in the hands of threads, packed, exported and on their way into the file.
    assert most - before < 2 * 4 * expert + 8e6, f"{(most - before) / 1e6:.1f} MB"


def _own_memory() -> int:
    with open("/proc/self/status") as status:
        [line] = [line for line in status if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_slots_are_filled_through_the_map(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    convert(source, tmp_path / "packed", backend="AMXINT8")
    options: dict[str, Any] = {"experts": [0, 2], "physical_to_logical_map": [2, 0, 1]}
    packed = ktk.MoE.from_checkpoint(tmp_path / "packed", 0, **options)
    direct = ktk.MoE.from_checkpoint(source, 0, "AMXINT8", **options)
    assert torch.equal(outputs(packed), outputs(direct))
    assert packed.nbytes == direct.nbytes == 2 * packed.expert_nbytes


def test_files_do_not_depend_on_threads(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 4))
    for threads in (1, 3):
        convert(source, tmp_path / str(threads), backend="AMXINT4", threads=threads)
    first, second = (made.contents(tmp_path / str(threads)) for threads in (1, 3))
    assert set(first) == {
        "config.json",
        "ktk_packed.json",
        "layer-00000.safetensors",
        "layer-00004.safetensors",
    }
    assert first == second


def test_a_folder_describes_itself(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(1, 2, 5))
    convert(source, tmp_path / "packed", backend="AMXINT8", layers=[1, 5])
    found = inspect(tmp_path / "packed")
    assert [(layer.number, layer.default_backend, layer.error) for layer in found] == [
        (1, "AMXINT8", None),
        (5, "AMXINT8", None),
    ]
    for layer in found:
        assert (layer.family, layer.stored) == ("packed for AMXINT8", str(ROWS))
        file = tmp_path / "packed" / f"layer-{layer.number:05d}.safetensors"
        data = file.read_bytes()
        assert layer.nbytes == len(data) - 8 - int.from_bytes(data[:8], "little")
    assert json.loads((tmp_path / "packed" / "config.json").read_text()) == made.config()
    assert str(describe(tmp_path / "packed")) == (
        "qwen3_moe: 3 experts of 128 x 512, 2 per token, i8 with f32 scales per 1 x k, in layers "
        "1, 5"
    )


def test_any_reader_of_safetensors_understands_a_file(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", GROUPS)
    [plan] = convert(source, tmp_path / "packed", backend="AMXINT4")
    tensors = load_file(plan.path)
    given = load_file(source / "model.safetensors")
    stem = "model.layers.0.mlp.experts.2.up_proj.weight_"
    assert torch.equal(tensors["up"][2], given[stem + "packed"].view(torch.uint8))
    assert torch.equal(tensors["up_scale"][2], given[stem + "scale"])


def test_whole_models_are_loaded(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1))
    convert(source, tmp_path / "packed", backend="AMXINT8")
    model = ktk.Model.from_checkpoint(tmp_path / "packed", progress=False)
    assert model.layers == (0, 1)
    direct = ktk.MoE.from_checkpoint(source, 1, "AMXINT8")
    assert torch.equal(outputs(model[1]), outputs(direct))


def test_what_was_converted_can_be_converted(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    convert(source, tmp_path / "bf16", backend="BF16")
    convert(tmp_path / "bf16", tmp_path / "again", backend="AMXINT8")
    convert(source, tmp_path / "once", backend="AMXINT8")
    again, once = (ktk.MoE.from_checkpoint(tmp_path / name, 0) for name in ("again", "once"))
    assert same_weights(again, once)
