"""Checkpoints are read as published, and every kind of damage is named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import unread_experts
from safetensors.torch import load_file, save_file

from ktk import Format
from ktk.checkpoint import describe
from ktk.checkpoint.config import read_config
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.checkpoint.safetensors.families import families
from ktk.checkpoint.spans import spans
from ktk.errors import CheckpointError
from ktk.expert import Expert
from ktk.loading import load_moe

E, K, H, I = 3, 2, 20, 12  # noqa: E741 - the names the table uses
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": E,
    "num_experts_per_tok": K,
    "hidden_size": H,
    "intermediate_size": 99,
    "moe_intermediate_size": I,
    "hidden_act": "silu",
}
SIZES = {"E": E, "EI": E * I, "H": H, "I": I, "2I": 2 * I, "I2": 2 * I}
Tensors = dict[str, torch.Tensor]
# With a model type that has it: those with a gate, and those without.
ALL_FAMILIES = {
    f"{family.name}{suffix}": (family, (*family.model_types, model_type)[0])
    for gated, suffix, model_type in ((True, "", "any_moe"), (False, " ungated", "nemotron_h"))
    for family in families(gated=gated)
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def experts(*, bias: bool = False) -> dict[str, torch.Tensor]:
    """All experts' weights, stacked, as the mathematics has them."""
    parts = {
        "gate": random(E, I, H, seed=1),
        "up": random(E, I, H, seed=2),
        "down": random(E, H, I, seed=3),
    }
    if bias:
        parts["gate_bias"] = random(E, I, seed=4)
        parts["up_bias"] = random(E, I, seed=5)
        parts["down_bias"] = random(E, H, seed=6)
    return parts


def qwen3(prefix: str = "model.layers.0.") -> Tensors:
    return {
        f"{prefix}mlp.experts.{e}.{part}_proj.weight": stacked[e].clone()
        for part, stacked in experts().items()
        for e in range(E)
    }


def write(
    folder: Path, tensors: Tensors, config: dict[str, Any] | None = None, shards: int = 1
) -> Path:
    """Write a checkpoint as a hub would hold it: one file without an index, or several with one."""
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def assert_reads(folder: Path, expected: dict[str, torch.Tensor], layer: int = 0) -> str:
    """Every expert must come out as it went in; returns the family that was recognised."""
    with SafetensorsCheckpoint(folder) as checkpoint:
        found = checkpoint.layer(layer)
        for e in range(E):
            got = found.expert(e).arrays()
            assert got.keys() == expected.keys()
            for part, stacked in expected.items():
                assert got[part].is_contiguous(), part
                assert torch.equal(got[part], stacked[e]), f"{part} of expert {e}"
            unread_experts.assert_same(found, e)
        return found.names.family.name


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_experts_are_found_in_any_number_of_files(tmp_path: Path, shards: int) -> None:
    assert assert_reads(write(tmp_path, qwen3(), shards=shards), experts()) == "per-expert"


@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_row_of_the_table_reads_what_it_declares(
    tmp_path: Path, family: str, biased: bool
) -> None:
    """Writes each family from its row by plain indexing, another way than the reader's."""
    row, model_type = ALL_FAMILIES[family]
    wanted = experts(bias=biased)
    parts = dict(row.parts)
    if biased:
        for part, stored in row.parts.items():
            parts[f"{part}_bias"] = stored.bias("I" if part == "down" else "H")
    if parts.keys().isdisjoint(("gate", "gate_up")):
        wanted = {part: one for part, one in wanted.items() if not part.startswith("gate")}
    tensors = {}
    for part, stored in parts.items():
        axes = stored.axes.split()
        for e in range(1 if stored.fused else E):
            tensor = torch.empty([SIZES[axis] for axis in axes], dtype=torch.bfloat16)
            for index in (torch.ones_like(tensor) > 0).nonzero().tolist():
                at = dict(zip(axes, index, strict=True))
                if "EI" in at:
                    at["E"], at["I"] = divmod(at["EI"], I)
                source = part
                if "2I" in at:
                    source = part.replace("gate_up", "gate" if at["2I"] < I else "up")
                    at["I"] = at["2I"] % I
                if "I2" in at:
                    source = part.replace("gate_up", "up" if at["I2"] % 2 else "gate")
                    at["I"] = at["I2"] // 2
                order = ("H", "I") if source.startswith("down") else ("I", "H")
                stacked = wanted[source][at.get("E", e)]
                place = [at[axis] for axis in order if axis in at][: stacked.dim()]
                tensor[tuple(index)] = stacked[tuple(place)]
            tensors["model.layers.0.mlp." + stored.name.format(e=e)] = tensor
    write(tmp_path, tensors, {**CONFIG, "model_type": model_type})
    assert assert_reads(tmp_path, wanted) == row.name


def test_describe_reads_headers(tmp_path: Path) -> None:
    tensors = {**qwen3("model.layers.2."), **qwen3("model.layers.3."), **qwen3("model.layers.5.")}
    write(tmp_path, tensors, shards=3)
    text = str(describe(tmp_path))
    assert text == "qwen3_moe: 3 experts of 20 x 12, 2 per token, BF16, in layers 2-3, 5"


def test_spans() -> None:
    assert spans([]) == ""
    assert spans([4]) == "4"
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


class RecordingBackend:
    """Stands for a backend and keeps what it is given."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.loaded: dict[int, Expert] = {}
        self.left_out: list[int] = []
        self.core = SimpleNamespace(
            stored_as=lambda given, n, k, wanted=None: given,
            packed_size=lambda stored, n, k: n * k,
        )
        self.name, self.formats = "RECORDING", [Format("bf16")]

    def moe(self, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(load_expert=self.load_expert, leave_out=self.left_out.append)

    def load_expert(self, slot: int, expert: Expert) -> None:
        assert {matrix.format for matrix in expert.matrices.values()} == {Format("bf16")}
        unread_experts.fill(expert)
        self.loaded[slot] = expert


def test_load_moe_passes_sizes_and_options(tmp_path: Path) -> None:
    backend = RecordingBackend()
    load_moe(write(tmp_path, qwen3()), 0, backend, shards=2)  # type: ignore[arg-type]
    assert backend.options == {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
        "activation": "silu",
        "activation_limit": None,
        "activation_alpha": 1.702,
        "clamp_gate_below": False,
        "gate_softcap": None,
        "up_softcap": None,
        "gated": True,
        "apply_router_weight_on_input": False,
        "zero_expert_num": 0,
        "variant": None,
        "force": False,
        "pool": None,
        "shards": 2,
        "weight_format": None,
    }
    assert sorted(backend.loaded) == [0, 1, 2]


def test_load_moe_takes_only_the_slots_asked_for_through_the_map(tmp_path: Path) -> None:
    backend = RecordingBackend()
    write(tmp_path, qwen3())
    load_moe(tmp_path, 0, backend, experts=[0, 2], physical_to_logical_map=[2, 0, 1])  # type: ignore[arg-type]
    assert sorted(backend.loaded) == [0, 2]
    assert backend.left_out == [1]
    first, second = backend.loaded[0].gate, backend.loaded[2].gate
    assert first is not None
    assert second is not None
    assert torch.equal(first.data, experts()["gate"][2])
    assert torch.equal(second.data, experts()["gate"][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": [0, 3]}, "experts has 3, expected 0 <= expert < 3"),
        ({"physical_to_logical_map": [0, 1]}, "has 2 entries, expected 3"),
        ({"physical_to_logical_map": [0, 1, -1]}, "physical_to_logical_map has -1"),
    ],
)
def test_load_moe_checks_slots(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_moe(write(tmp_path, qwen3()), 0, RecordingBackend(), **options)  # type: ignore[arg-type]


def test_sizes_cannot_be_overridden(tmp_path: Path) -> None:
    folder, backend = write(tmp_path, qwen3()), RecordingBackend()
    more = replace(read_config(folder).layer(), num_experts=E + 1)
    with pytest.raises(ValueError, match="has num_experts 3, but 4 is asked for: is it of another"):
        load_moe(folder, 0, backend, config=more)  # type: ignore[arg-type]
    load_moe(folder, 0, backend, config=more, physical_to_logical_map=[2, 0, 1, 2])  # type: ignore[arg-type]
    assert sorted(backend.loaded) == [0, 1, 2, 3]
    wide = replace(more, hidden_size=2 * H)
    with pytest.raises(ValueError, match="the checkpoint has hidden_size"):
        load_moe(folder, 0, backend, config=wide, physical_to_logical_map=[0] * 4)  # type: ignore[arg-type]


GATE0 = "model.layers.0.mlp.experts.0.gate_proj.weight"
GATE2 = "model.layers.0.mlp.experts.2.gate_proj.weight"


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: value for key, value in tensors.items() if key != name}


@pytest.mark.parametrize("text", ["{", "[1]", json.dumps({"hidden_size": 8})])
def test_a_broken_configuration_is_named(tmp_path: Path, text: str) -> None:
    write(tmp_path, qwen3())
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        SafetensorsCheckpoint(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write(tmp_path, without(qwen3(), GATE2))
    with pytest.raises(CheckpointError, match=f"no tensor {GATE2}"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_more_experts_than_configured_are_named(tmp_path: Path) -> None:
    write(tmp_path, qwen3(), {**CONFIG, "num_experts": 2})
    with pytest.raises(CheckpointError, match=f"{GATE2}.*there are 2 experts"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    write(tmp_path, {**qwen3(), GATE2: random(I, H + 1)})
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(tmp_path).layer(0)
    for part in (GATE2, "model.safetensors", str([I, H + 1]), str([I, H])):
        assert part in str(caught.value)


def test_fused_experts_of_a_wrong_shape_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    down = "model.layers.0.mlp.experts.down_proj"
    write(tmp_path, {name: random(E, 2 * I + 1, H), down: random(E, H, I)})
    with pytest.raises(CheckpointError, match=f"{name} .*shape"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_biases_of_zeros_are_ignored_and_those_of_one_expert_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.experts.1.up_proj.bias"
    write(tmp_path, {**qwen3(), name: torch.zeros(I).bfloat16()})
    assert_reads(tmp_path, experts())
    write(tmp_path, {**qwen3(), name: random(I)})
    other = name.replace("experts.1", "experts.0")
    with pytest.raises(CheckpointError, match=f"has no tensor {other}"):
        assert_reads(tmp_path, experts())


SURPRISING = {
    "a second scale": "model.layers.0.mlp.experts.1.up_proj.weight_scale_2",
    "an adapter": "model.layers.0.mlp.experts.1.up_proj.lora_A.weight",
    "another form": "model.layers.0.mlp.experts.gate_up_proj",
    "a matrix of another name": "model.layers.0.mlp.experts.1.foo_proj.weight",
    "no matrix": "model.layers.0.mlp.experts.1.foo",
    "a norm of all experts": "model.layers.0.mlp.experts.norm.weight",
    "another part": "model.layers.0.mlp.experts.gate_up_proj_bias",
    "names that none has, in another module": "model.layers.0.ffn.experts.0.w9.weight",
}


@pytest.mark.parametrize("name", SURPRISING.values(), ids=SURPRISING)
def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path, name: str) -> None:
    write(tmp_path, {**qwen3(), name: random(E, I, H)})
    with pytest.raises(CheckpointError, match=rf"tensor {name} in .*is none that ktk reads"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_what_is_beside_routed_experts_is_left_alone(tmp_path: Path) -> None:
    beside = (
        *("mlp.shared_experts.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        *("mlp.shared_expert_gate.weight", "mlp.experts.e_score_correction_bias"),
        *("mlp.gate.weight", "mlp.experts.0.gate_proj.input_scale", "mlp.down_proj.weight"),
    )
    tensors = {f"model.layers.0.{name}": random(4, 4) for name in beside}
    write(tmp_path, {**qwen3(), **tensors})
    assert_reads(tmp_path, experts())
    assert describe(tmp_path).layers == (0,)


def test_an_element_type_that_needs_scales_is_refused(tmp_path: Path) -> None:
    fp8 = random(I, H).to(torch.float8_e4m3fn)
    write(tmp_path, {**qwen3(), GATE0: fp8})
    with pytest.raises(CheckpointError, match=f"{GATE0}.*F8_E4M3"):
        SafetensorsCheckpoint(tmp_path).layer(0)


@pytest.mark.parametrize("keep", [0, 5, 100, -7])
def test_a_truncated_file_is_named(tmp_path: Path, keep: int) -> None:
    write(tmp_path, qwen3(), shards=2)
    file = tmp_path / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=f"{file.name} is damaged or truncated"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write(tmp_path, qwen3(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    write(tmp_path, without(qwen3(), GATE2), shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][GATE2] = "model-00001-of-00002.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=rf"model-00001.* lacks the tensor {GATE2}"):
        SafetensorsCheckpoint(tmp_path).layer(0)


BIAS = "model.layers.0.mlp.experts.2.up_proj.bias"


def unlisted(folder: Path, file: str, more: Tensors, listed: Tensors | None = None) -> None:
    """Add tensors to a file, and those of them that are `listed` to the index."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(listed or {}, file)
    path.write_text(json.dumps(index))
    there = load_file(folder / file) if (folder / file).exists() else {}
    save_file({**there, **more, **(listed or {})}, folder / file)


@pytest.mark.parametrize("shard", [1, 2])
def test_a_bias_that_the_index_does_not_list_is_not_left_out(tmp_path: Path, shard: int) -> None:
    write(tmp_path, qwen3(), shards=2)
    file = f"model-{shard:05d}-of-00002.safetensors"
    biases = experts(bias=True)["up_bias"]
    more = {BIAS.replace("2", str(e)): one.clone() for e, one in enumerate(biases)}
    unlisted(tmp_path, file, more)
    with pytest.raises(CheckpointError) as caught:
        SafetensorsCheckpoint(tmp_path).layer(0)
    assert str(caught.value) == (
        f"{tmp_path / file} holds the tensor {next(iter(more))} and 2 more, which "
        "model.safetensors.index.json does not list: the index is of other files. Download it "
        "again, or remove it, and ktk reads all that the files hold"
    )
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_reads(tmp_path, {**experts(), "up_bias": biases})


def test_such_a_bias_is_found_where_the_rest_of_its_layer_lies(tmp_path: Path) -> None:
    """Writers fill one file after the other, so a bias may be in one without other experts."""
    norm = {"model.layers.0.input_layernorm.weight": random(H)}
    write(tmp_path, {**qwen3(), **qwen3("model.layers.1.")}, shards=2)
    unlisted(tmp_path, "norms.safetensors", {BIAS: random(I)}, listed=norm)
    with SafetensorsCheckpoint(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match=rf"norms\.safetensors holds the tensor {BIAS}, "):
            checkpoint.layer(0)
        checkpoint.layer(1)
    # Who has fetched the files of experts only may go on.
    (tmp_path / "norms.safetensors").unlink()
    SafetensorsCheckpoint(tmp_path).layer(0)


def test_the_index_says_which_of_two_copies_is_meant(tmp_path: Path) -> None:
    tensors = qwen3()
    write(tmp_path, tensors, shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    (other,) = set(index.values()) - {index[GATE2]}
    unlisted(tmp_path, other, {GATE2: torch.ones(2, 2)})
    assert_reads(tmp_path, experts())


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        SafetensorsCheckpoint(tmp_path)


def test_a_layer_without_experts_says_which_layers_have_some(tmp_path: Path) -> None:
    dense = {"model.layers.0.mlp.gate_proj.weight": random(I, H)}
    write(tmp_path, {**dense, **qwen3("model.layers.1."), **qwen3("model.layers.2.")})
    with pytest.raises(CheckpointError, match="layer 0; layers with experts: 1-2"):
        SafetensorsCheckpoint(tmp_path).layer(0)


def test_experts_of_an_unknown_scheme_are_listed(tmp_path: Path) -> None:
    write(tmp_path, {"model.layers.0.ffn.experts.0.w9.weight": random(I, H)})
    with pytest.raises(CheckpointError, match=r"it has .*ffn\.experts\.\*\.w9\.weight"):
        SafetensorsCheckpoint(tmp_path).layer(0)
