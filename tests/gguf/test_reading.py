"""Experts come out of GGUF files as they went in, in every layout and type."""

from __future__ import annotations

import shutil
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import gguf_files as files
import numpy as np
import pytest
import torch
import unread_experts
from gguf_files import ENCODED, FIELDS, PLAIN, E, H, I, Tensor

from ktk import Format, ik_types
from ktk.checkpoint import describe
from ktk.checkpoint.gguf import GgufCheckpoint
from ktk.checkpoint.gguf.header import open_file
from ktk.errors import CheckpointFormatError
from ktk.expert import Expert
from ktk.loading import load_moe

DECODED = (
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "NVFP4", "IQ1_S", "IQ1_M"),
    *("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
)


def assert_reads(path: Path, expected: dict[str, Tensor], layer: int = 0) -> None:
    """Every expert must have the values that gguf's decoder gives."""
    with GgufCheckpoint(path) as checkpoint:
        found = checkpoint.layer(layer)
        for e in range(E):
            got = found.values(e, torch.float32).arrays()
            assert got.keys() == expected.keys()
            for part, stack in expected.items():
                assert got[part].is_contiguous(), part
                values = got[part].double().numpy()
                np.testing.assert_array_equal(values, stack.values[e], f"{part} of expert {e}")
            unread_experts.assert_same(found, e)


@pytest.mark.parametrize("kind", [*PLAIN, *ENCODED, *DECODED, *ik_types.TYPES])
def test_every_type_has_the_values_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    parts = files.experts(kind)
    assert_reads(files.write(tmp_path / "m.gguf", files.stacked(parts)), parts)


@pytest.mark.parametrize("layout", [files.stacked, files.single, files.fused])
def test_every_layout_is_read(tmp_path: Path, layout: Any) -> None:
    parts = files.experts("Q4_0", down="Q8_0")
    assert_reads(files.write(tmp_path / "m.gguf", layout(parts, 7)), parts, layer=7)


@pytest.mark.parametrize("layout", [files.stacked, files.fused])
def test_biases_are_read(tmp_path: Path, layout: Any) -> None:
    parts = files.experts("MXFP4", bias=True)
    assert_reads(files.write(tmp_path / "m.gguf", layout(parts)), parts)


def test_gate_up_and_down_may_differ_in_type(tmp_path: Path) -> None:
    parts = files.experts("Q4_K", "F16", "Q6_K")
    assert_reads(files.write(tmp_path / "m.gguf", files.stacked(parts)), parts)


@pytest.mark.parametrize("down", ["BF16", "F32"])
def test_scales_of_experts_multiply_their_weights(tmp_path: Path, down: str) -> None:
    """As gemma4 has for down, and what was quantised to NVFP4 for all."""
    parts = files.experts("Q8_0", down=down)
    scales = np.array([0.5, 2.0, -1.0, 3.0], np.float32)
    tensors = files.fused(parts)
    for name in ("gate_up", "down"):
        tensors[f"blk.0.ffn_{name}_exps.scale"] = Tensor(scales, gguf.GGMLQuantizationType.F32)
    with GgufCheckpoint(files.write(tmp_path / "m.gguf", tensors)) as checkpoint:
        found = checkpoint.layer(0)
        for e in range(E):
            for part, got in found.values(e, torch.float32).arrays().items():
                expected = (parts[part].values[e] * scales[e]).astype(np.float32)
                np.testing.assert_array_equal(got.numpy(), expected)
            unread_experts.assert_same(found, e)


@pytest.mark.parametrize(("down", "as_it_is"), [("F16", True), ("Q4_K", True), ("IQ4_KS", False)])
def test_what_is_stored_as_it_is_given_is_left_to_workers(
    tmp_path: Path, down: str, as_it_is: bool
) -> None:
    """Rows of ik_llama.cpp's types have a scale ahead of their blocks."""
    parts = files.experts("Q8_0", down=down)
    with GgufCheckpoint(files.write(tmp_path / "m.gguf", files.stacked(parts))) as checkpoint:
        layer = checkpoint.layer(0)
        for e in range(E):
            sizes = {part: parts[part].data[e].nbytes for part in files.PARTS}
            left_out = 0 if as_it_is else sizes["down"]
            assert unread_experts.assert_same(layer, e) == sum(sizes.values()) - left_out


def test_floats_and_blocks_are_those_of_the_file(tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.gguf", files.stacked(files.experts("Q8_0", "BF16", "F32")))
    reader = {t.name: t for t in gguf.GGUFReader(path).tensors}
    with GgufCheckpoint(path) as checkpoint:
        layer = checkpoint.layer(0)
        for part, matrix in layer.expert(1).matrices.items():
            info = reader[f"blk.0.ffn_{part}_exps.weight"]
            assert matrix.format == layer.formats[part].format
            assert matrix.format.element == info.tensor_type.name.lower()
            np.testing.assert_array_equal(
                matrix.data.view(torch.uint8).numpy(), info.data[1].view(np.uint8)
            )


def test_the_header_is_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = files.write(
        tmp_path / "m.gguf",
        files.stacked(files.experts("Q5_1", bias=True)),
        fields={**FIELDS, "swiglu_clamp_exp": [0.0, 7.5]},
    )
    ours, theirs = open_file(path), gguf.GGUFReader(path)
    assert {name: (t.shape, t.type, t.begin) for name, t in ours.tensors.items()} == {
        t.name: (tuple(t.shape.tolist()[::-1]), t.tensor_type, t.data_offset)
        for t in theirs.tensors
    }
    for name, field in theirs.fields.items():
        if name.startswith("GGUF.") or field.types[-1] == gguf.GGUFValueType.STRING:
            continue
        np.testing.assert_array_equal(ours.fields[name], field.contents())
    assert ours.fields["general.architecture"] == "qwen3moe"


@pytest.mark.parametrize("which", ["first", "last", "folder", "out of order"])
def test_split_models_are_found_by_any_file_or_their_folder(tmp_path: Path, which: str) -> None:
    parts = files.experts("Q4_1", down="Q5_0")
    tensors = {**files.stacked(parts, 0), **files.stacked(parts, 1)}
    first = files.write(tmp_path / "m.gguf", tensors, shard_tensors=4)
    last = first.with_name("m-00002-of-00002.gguf")
    assert last.exists(), "the model should be in two files"
    if which == "out of order":
        # The same files in a folder that lists them the other way round.
        folder = tmp_path / "copies"
        folder.mkdir()
        for path in (last, first):
            shutil.copy(path, folder)
        path = folder
    else:
        path = {"first": first, "last": last, "folder": tmp_path}[which]
    for layer in (0, 1):
        assert_reads(path, parts, layer)
    assert describe(path).layers == (0, 1)


def test_an_image_encoder_beside_the_model_is_passed_over(tmp_path: Path) -> None:
    parts = files.experts()
    files.write(tmp_path / "model.gguf", files.stacked(parts))
    files.write(tmp_path / "a-mmproj.gguf", {}, arch="clip", fields={})
    (tmp_path / "config.json").write_text("{}")
    assert_reads(tmp_path, parts)


def test_describe_names_sizes_and_types(tmp_path: Path) -> None:
    parts = files.experts("Q4_K", down="Q6_K")
    tensors = {**files.stacked(parts, 3), **files.stacked(parts, 4)}
    text = str(describe(files.write(tmp_path / "m.gguf", tensors)))
    assert text == f"qwen3moe: 4 experts of {H} x {I}, 2 per token, Q4_K, Q6_K, in layers 3-4"


class RecordingBackend:
    """Stands for a backend that takes certain formats, and keeps what it is given."""

    def __init__(self, *accepts: str) -> None:
        self.elements = accepts
        self.core = SimpleNamespace(
            stored_as=self.stored_as, packed_size=lambda stored, n, k: n * k
        )
        self.name = "RECORDING"
        self.accepts = self.formats = [Format(name) for name in accepts]
        self.options: dict[str, Any] = {}
        self.loaded: dict[int, Expert] = {}
        self.left_out: list[int] = []

    def moe(self, **options: Any) -> Any:
        self.options = options
        return SimpleNamespace(load_expert=self.load_expert, leave_out=self.left_out.append)

    def stored_as(self, given: Format, n: int, k: int, wanted: Format | None = None) -> Format:
        assert (n, k) in ((I, H), (H, I))
        if given.element not in self.elements:
            raise ValueError(f"takes {', '.join(self.elements)}")
        return given

    def load_expert(self, slot: int, expert: Expert) -> None:
        unread_experts.fill(expert)
        self.loaded[slot] = expert


def formats_of(expert: Expert) -> tuple[str, ...]:
    return tuple(str(matrix.format) for matrix in expert.matrices.values())


def test_a_backend_that_takes_the_blocks_gets_them(tmp_path: Path) -> None:
    parts = files.experts("Q4_K", bias=True)
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    backend = RecordingBackend("bf16", "q4_k")
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    assert sorted(backend.loaded) == list(range(files.E))
    for e, expert in backend.loaded.items():
        assert formats_of(expert) == ("q4_k", "q4_k", "q4_k")
        for part, matrix in expert.matrices.items():
            np.testing.assert_array_equal(matrix.data, parts[part].data[e])
        np.testing.assert_array_equal(expert.down.bias, parts["down_bias"].data[e])


def test_each_part_is_given_as_it_is_stored(tmp_path: Path) -> None:
    parts = files.experts("Q4_K", "Q8_0", "BF16")
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    backend = RecordingBackend("f32", "bf16", "q4_k", "q8_0")
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    expert = backend.loaded[3]
    assert formats_of(expert) == ("q4_k", "q8_0", "bf16")
    for part in ("gate", "up"):
        np.testing.assert_array_equal(expert.matrices[part].data, parts[part].data[3])
    assert expert.down.data.dtype == torch.bfloat16
    np.testing.assert_array_equal(expert.down.data.double(), parts["down"].values[3])


def test_a_part_that_a_backend_does_not_take_is_floats(tmp_path: Path) -> None:
    parts = files.experts("Q4_K", down="Q6_K")
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    backend = RecordingBackend("f32", "q4_k")
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    expert = backend.loaded[0]
    assert formats_of(expert) == ("q4_k", "q4_k", "f32")
    np.testing.assert_array_equal(expert.down.data.double(), parts["down"].values[0])
    with pytest.raises(CheckpointFormatError, match=r"ffn_down_exps.*m\.gguf.*Q6_K: takes q4_k"):
        load_moe(path, 0, RecordingBackend("q4_k"))  # type: ignore[arg-type]


SCALES = np.array([0.5, 1, 2, 3], np.float32)


def test_scales_go_with_their_blocks(tmp_path: Path) -> None:
    parts = files.experts("Q4_K")
    tensors = files.stacked(parts)
    tensors["blk.0.ffn_up_exps.scale"] = Tensor(SCALES, gguf.GGMLQuantizationType.F32)
    backend = RecordingBackend("f32", "q4_k")
    load_moe(files.write(tmp_path / "m.gguf", tensors), 0, backend)  # type: ignore[arg-type]
    expert = backend.loaded[3]
    assert formats_of(expert) == ("q4_k", "q4_k", "q4_k")
    np.testing.assert_array_equal(expert.up.data, parts["up"].data[3])
    np.testing.assert_array_equal(expert.up.scale, SCALES[3:])
    assert expert.gate is not None
    assert expert.gate.scale is None


@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0"])
def test_floats_and_what_is_decoded_are_scaled(tmp_path: Path, kind: str) -> None:
    parts = files.experts("F32", kind)
    tensors = files.stacked(parts)
    tensors["blk.0.ffn_up_exps.scale"] = Tensor(SCALES, gguf.GGMLQuantizationType.F32)
    backend = RecordingBackend("f32", "bf16")
    load_moe(files.write(tmp_path / "m.gguf", tensors), 0, backend)  # type: ignore[arg-type]
    expert = backend.loaded[3]
    assert expert.arrays().keys() == set(files.PARTS)
    np.testing.assert_array_equal(
        expert.up.data.numpy(), parts["up"].values[3].astype(np.float32) * SCALES[3]
    )


def test_the_map_and_the_choice_of_slots_are_honoured(tmp_path: Path) -> None:
    parts = files.experts("F32")
    path = files.write(tmp_path / "m.gguf", files.stacked(parts))
    backend = RecordingBackend("f32")
    load_moe(path, 0, backend, experts=[0, 3], physical_to_logical_map=[2, 0, 1, 3])  # type: ignore[arg-type]
    assert (sorted(backend.loaded), backend.left_out) == ([0, 3], [1, 2])
    np.testing.assert_array_equal(backend.loaded[0].up.data, parts["up"].data[2])
    np.testing.assert_array_equal(backend.loaded[3].up.data, parts["up"].data[3])


def test_no_more_than_one_expert_is_held_as_floats(tmp_path: Path) -> None:
    path = files.write(tmp_path / "m.gguf", files.stacked(files.experts("Q4_0")))

    class Forgetful(RecordingBackend):
        def load_expert(self, slot: int, expert: Expert) -> None:
            pass

    backend = Forgetful("f32")
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    tracemalloc.start()
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    expert = 3 * H * I * 4
    assert expert < peak < 2 * expert


@pytest.mark.parametrize("other", ["Q8_0", "BF16"])
def test_a_part_whose_types_differ_between_experts_is_floats(tmp_path: Path, other: str) -> None:
    """Possible where each has a tensor of its own: one format for all would misread them."""
    tensors = files.single(files.experts("Q4_K"))
    odd = files.tensor((H, I), other, 9)
    tensors["blk.0.ffn_down.3.weight"] = odd
    path = files.write(tmp_path / "m.gguf", tensors)
    backend = RecordingBackend("f32", "bf16", "q4_k", "q8_0")
    load_moe(path, 0, backend)  # type: ignore[arg-type]
    for e in (0, 3):
        assert formats_of(backend.loaded[e]) == ("q4_k", "q4_k", "f32")
        assert backend.loaded[e].down.data.dtype == torch.float32
    np.testing.assert_array_equal(backend.loaded[3].down.data.double(), odd.values)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_backend_that_takes_neither_blocks_nor_floats_is_told(tmp_path: Path, kind: str) -> None:
    path = files.write(tmp_path / "m.gguf", files.stacked(files.experts(kind)))
    with pytest.raises(CheckpointFormatError, match=rf"ffn_gate_exps.*m\.gguf.*{kind}: takes e4m3"):
        load_moe(path, 0, RecordingBackend("e4m3"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arch", "activation", "expected"),
    [
        ("deepseek4", "gelu", ("gelu", None)),
        ("deepseek4", "swish", ("silu", 10.0)),
        ("step35", "silu", ("swiglustep", 10.0)),
        ("minimax-m3", "silu", ("silu", None)),
        ("newmoe", "gelu", ("gelu", 10.0)),
    ],
)
def test_the_clamp_is_of_the_activation_that_the_architecture_means(
    tmp_path: Path, arch: str, activation: str, expected: tuple[object, ...]
) -> None:
    fields = {**FIELDS, "swiglu_clamp_exp": [9.0, 10.0]}
    tensors = files.stacked(files.experts(), 1)
    path = files.write(tmp_path / "m.gguf", tensors, arch=arch, fields=fields)
    backend = RecordingBackend("f32")
    load_moe(path, 1, backend, activation=activation)  # type: ignore[arg-type]
    assert (backend.options["activation"], backend.options["activation_limit"]) == expected


@pytest.mark.parametrize(
    ("arch", "fields", "expected"),
    [
        ("qwen3moe", {}, ("silu", None)),
        ("llama", {}, ("silu", None)),
        ("gemma4", {}, ("gelu_tanh", None)),
        ("gpt-oss", {}, ("swigluoai", 7.0)),
        ("deepseek4", {"swiglu_clamp_exp": [9.0, 10.0]}, ("silu", 10.0)),
        ("step35", {"swiglu_clamp_exp": [9.0, 0.0]}, ("silu", None)),
        ("maple", {}, ("silu", 7.0)),
        ("maple", {"swiglu_clamp_exp": [9.0, 10.0]}, ("silu", 10.0)),
        ("qwen3moe", {"expert_feed_forward_length": [8, I]}, ("silu", None)),
    ],
)
def test_the_architecture_means_an_activation(
    tmp_path: Path, arch: str, fields: dict[str, Any], expected: tuple[object, ...]
) -> None:
    tensors = files.stacked(files.experts(), 1)
    path = files.write(tmp_path / "m.gguf", tensors, arch=arch, fields={**FIELDS, **fields})
    backend = RecordingBackend("f32")
    load_moe(path, 1, backend)  # type: ignore[arg-type]
    assert (backend.options["activation"], backend.options["activation_limit"]) == expected
    sizes = ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")
    assert tuple(backend.options[name] for name in sizes) == (E, files.TOP, H, I)
