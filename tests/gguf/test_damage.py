"""Every kind of damage is one sentence that names the file, and the tensor where there is one."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import gguf_files as files
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf_files import FIELDS, E, H, I, Tensor

from ktk.checkpoint import describe
from ktk.checkpoint.gguf import GgufCheckpoint
from ktk.config import MoEConfig
from ktk.errors import CheckpointError
from ktk.loading import load_moe

LAYER = MoEConfig(num_experts=E, num_experts_per_tok=2, hidden_size=H, intermediate_size=I)
GATE = "blk.0.ffn_gate_exps.weight"
DOWN = "blk.0.ffn_down_exps.weight"


def fails(path: Path, *named: str, layer: int = 0) -> None:
    """Reading an expert must fail with a message that has all of these.

    So must loading the layer into a backend that takes blocks, which decodes none.
    """
    with pytest.raises(CheckpointError) as caught, GgufCheckpoint(path) as checkpoint:
        checkpoint.layer(layer).values(0)
    with pytest.raises(CheckpointError) as packing:
        load_moe(path, layer, "LLAMAFILE")
    for text in named:
        assert text in str(caught.value)
        assert text in str(packing.value)


@pytest.fixture(scope="module")
def parts() -> dict[str, Tensor]:
    return files.experts("Q4_0", down="Q8_0")


@pytest.fixture
def path(tmp_path: Path, parts: dict[str, Tensor]) -> Path:
    return files.write(tmp_path / "model.gguf", files.stacked(parts))


@pytest.fixture
def shards(tmp_path: Path, parts: dict[str, Tensor]) -> list[Path]:
    tensors = {**files.stacked(parts, 0), **files.stacked(parts, 1)}
    files.write(tmp_path / "model.gguf", tensors, shard_tensors=4)
    return sorted(tmp_path.glob("*.gguf"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf is missing"):
        load_moe(tmp_path / "nowhere.gguf", 0)


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML", b"\x89HDF etc"])
def test_another_kind_of_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a GGUF file"):
        describe(path)


@pytest.mark.parametrize(
    ("version", "message"), [(1, "has GGUF version 1"), (9, "version 9"), (3 << 24, "big-endian")]
)
def test_an_unknown_version_is_refused(path: Path, version: int, message: str) -> None:
    patch(path, 4, struct.pack("<I", version))
    fails(path, "model.gguf", message)


def patch(path: Path, at: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + len(data)] = data
    path.write_bytes(content)


def test_a_file_cut_anywhere_is_named(path: Path) -> None:
    whole = path.read_bytes()
    # The header byte by byte in places, then the data of the last expert.
    for length in [*range(8, 1500, 37), len(whole) // 2]:
        path.write_bytes(whole[:length])
        fails(path, "model.gguf", "truncated")
    path.write_bytes(whole[: -files.H])
    fails(path, "model.gguf is truncated", DOWN)


def test_a_damaged_header_never_fails_otherwise(path: Path) -> None:
    """Flips bytes of the header; what is read in spite of that must be a layer of experts."""
    whole = path.read_bytes()
    header = whole.index(b"blk.0.ffn_down_exps") + 100
    rng = random.Random(0)
    read = refused = 0
    for _ in range(300):
        patch(path, 0, whole)
        patch(path, rng.randrange(header), rng.randbytes(rng.choice((1, 1, 4, 8))))
        try:
            with GgufCheckpoint(path) as checkpoint:
                expert = checkpoint.layer(0).values(E - 1)
            assert expert.down.data.shape == expert.up.data.shape[::-1]
            read += 1
        except CheckpointError as error:
            assert "model.gguf" in str(error)  # noqa: PT017 - it may also succeed
            refused += 1
    # Both happen, or the damage is dull.
    assert min(read, refused) > 30


@pytest.mark.parametrize("name", [GATE, DOWN, "blk.0.ffn_up_exps.weight"])
def test_a_missing_tensor_is_named(tmp_path: Path, parts: dict[str, Tensor], name: str) -> None:
    tensors = files.stacked(parts)
    del tensors[name]
    fails(files.write(tmp_path / "model.gguf", tensors), f"model.gguf has no tensor {name}")


def test_a_missing_expert_is_named(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    tensors = files.single(parts)
    del tensors["blk.0.ffn_up.2.weight"]
    fails(files.write(tmp_path / "model.gguf", tensors), "no tensor blk.0.ffn_up.2.weight")


@pytest.mark.parametrize(
    ("count", "layout", "named"),
    [
        (3, files.stacked, (GATE, f"[4, {I}, {H}]", f"[3, {I}, {H}]")),
        (5, files.stacked, (GATE, f"[5, {I}, {H}]")),
        (3, files.single, ("blk.0.ffn_gate.3.weight", "there are 3 experts")),
        (5, files.single, ("no tensor blk.0.ffn_gate.4.weight",)),
    ],
)
def test_a_wrong_number_of_experts_is_named(
    tmp_path: Path, parts: dict[str, Tensor], count: int, layout: Any, named: tuple[str, ...]
) -> None:
    fields = {**FIELDS, "expert_count": count}
    fails(files.write(tmp_path / "model.gguf", layout(parts), fields=fields), "model.gguf", *named)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("expert_count", None, "has no qwen3moe.expert_count"),
        ("embedding_length", None, "has no qwen3moe.embedding_length"),
        ("expert_used_count", 0, "expert_used_count is 0, expected an integer from 1"),
        ("embedding_length", 2 * H, f"{GATE} in"),
        ("expert_feed_forward_length", 2 * I, f"has {I} rows for up"),
    ],
)
def test_metadata_that_do_not_fit_are_named(
    tmp_path: Path, parts: dict[str, Tensor], field: str, value: int | None, message: str
) -> None:
    fields = {name: v for name, v in {**FIELDS, field: value}.items() if v is not None}
    path = files.write(tmp_path / "model.gguf", files.stacked(parts), fields=fields)
    fails(path, "model.gguf", message)


def test_a_type_that_gguf_does_not_know_is_named(path: Path) -> None:
    # Behind the name: the number of dimensions, three dimensions, the type.
    at = path.read_bytes().index(DOWN.encode()) + len(DOWN) + 4 + 3 * 8
    patch(path, at, struct.pack("<I", 99))
    fails(path, DOWN, "model.gguf", "ggml type 99", "does not know, and ktk neither")


def test_a_type_that_gguf_cannot_decode_is_named(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    rows = np.zeros((E, I, H // 32 * 40), np.uint8)
    tensors = {**files.stacked(parts), GATE: Tensor(rows, Type.Q8_1)}
    path = files.write(tmp_path / "model.gguf", tensors)
    fails(path, GATE, "model.gguf", "Q8_1", "cannot decode")


def test_an_unknown_type_elsewhere_does_not_matter(path: Path) -> None:
    name = b"token_embd.weight"
    at = path.read_bytes().index(name) + len(name) + 4 + 2 * 8
    patch(path, at, struct.pack("<I", 99))
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.layer(0).config.num_experts == E


def test_a_layer_without_experts_says_which_have_some(tmp_path: Path) -> None:
    tensors = {**files.stacked(files.experts(), 2), **files.stacked(files.experts(), 3)}
    path = files.write(tmp_path / "model.gguf", tensors)
    fails(path, "no experts in layer 0; layers with experts: 2-3")


def test_a_model_without_experts_is_named(tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", {})
    with pytest.raises(CheckpointError, match=r"model\.gguf has no experts"):
        describe(path)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_shard_is_named(shards: list[Path], lost: int) -> None:
    shards[lost].unlink()
    for path in (shards[1 - lost], shards[0].parent):
        fails(path, f"{shards[lost].name} is missing")


def test_a_renamed_shard_is_refused(shards: list[Path]) -> None:
    fails(shards[0].rename(shards[0].with_name("part1.gguf")), "part1.gguf", "split.count")


def test_a_shard_in_the_place_of_another_is_refused(shards: list[Path]) -> None:
    shards[1].write_bytes(shards[0].read_bytes())
    fails(shards[0], f"{shards[1].name}: split.no is 0, its name means 1")


def test_a_shard_of_another_model_is_refused(
    tmp_path: Path, shards: list[Path], parts: dict[str, Tensor]
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    tensors = {**files.stacked(parts, 0), **files.stacked({"gate": parts["gate"]}, 1)}
    files.write(other / "model.gguf", tensors, shard_tensors=4)
    shards[1].write_bytes((other / shards[1].name).read_bytes())
    fails(shards[0], shards[0].name, "hold 5 tensors, but split.tensors.count is 7")


def test_a_folder_of_several_models_is_refused(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    for name in ("a.gguf", "b.gguf"):
        files.write(tmp_path / name, files.stacked(parts))
    fails(tmp_path, str(tmp_path), "one model", "a, b")


@pytest.mark.parametrize(
    ("arch", "fields", "named"),
    [
        ("kimi-k3", {}, "'situ' needs gate_softcap"),
        ("newmoe", {}, "which activation function model type 'newmoe' has: say it, by activation="),
    ],
)
def test_an_activation_that_ktk_lacks_is_named(
    tmp_path: Path, parts: dict[str, Tensor], arch: str, fields: dict[str, Any], named: str
) -> None:
    path = files.write(
        tmp_path / "model.gguf", files.stacked(parts), arch=arch, fields={**FIELDS, **fields}
    )
    with pytest.raises(CheckpointError, match=named):
        load_moe(path, 0, "BF16")


def test_a_family_is_refused_with_the_reason(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    path = files.write(tmp_path / "model.gguf", files.stacked(parts), arch="muse_spark")
    fails(path, "'muse_spark' normalises what an expert returns")
    with pytest.raises(CheckpointError, match="normalises"):
        load_moe(path, 0, "LLAMAFILE", config=LAYER)


def test_llama_4_multiplies_what_goes_in(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    path = files.write(tmp_path / "model.gguf", files.stacked(parts), arch="llama4")
    config = load_moe(path, 0, "LLAMAFILE").config
    assert (config.activation, config.apply_router_weight_on_input) == ("silu", True)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (files.stacked, "blk.0.ffn_gate_chexps.weight"),  # GroveMoE
        (files.stacked, "blk.0.ffn_up_exps.weight_scale"),
        (files.stacked, "blk.0.ffn_gate_up_exps.bias"),
        (files.fused, GATE),
        (files.single, "blk.0.ffn_up.1.bias"),
        (files.single, "blk.0.ffn_up.1.scale"),
    ],
)
def test_a_tensor_of_experts_that_is_not_read_is_named(
    tmp_path: Path, parts: dict[str, Tensor], layout: Any, name: str
) -> None:
    same = {**parts, "up": parts["gate"]}
    tensors = {**layout(same), name: Tensor(np.ones((E, I), np.float32), Type.F32)}
    path = files.write(tmp_path / "model.gguf", tensors)
    fails(path, f"tensor {name} in {path} is none that ktk reads with experts such as blk.0.ffn_")


def test_what_is_beside_experts_does_not_matter(tmp_path: Path, parts: dict[str, Tensor]) -> None:
    one = Tensor(np.ones(E, np.float32), Type.F32)
    names = ("gate_exps.input_scale", "gate_inp.weight", "norm_exps.weight", "gate_shexp.weight")
    beside = {f"blk.0.ffn_{name}": one for name in names}
    path = files.write(tmp_path / "model.gguf", {**files.stacked(parts), **beside})
    with GgufCheckpoint(path) as checkpoint:
        assert checkpoint.layer(0).config.num_experts == E


@pytest.mark.parametrize("at", [8, 16])
@pytest.mark.parametrize("count", [2**64 - 1, 2**40, 10**6])
def test_more_entries_than_the_file_has_bytes_for_are_refused_at_once(
    path: Path, at: int, count: int
) -> None:
    """Tensors, then entries. Zeros behind the header would make entries without end."""
    patch(path, at, struct.pack("<Q", count))
    fails(path, "model.gguf", "bytes expected, there are")


def test_a_header_of_zeros_is_refused_at_once(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1))
        file.truncate(24)
        file.truncate(1 << 33)
    fails(path, "bytes expected, there are")
    patch_in_place(path, 16, struct.pack("<Q", 1 << 20))
    fails(path, "has the entry  twice")


def patch_in_place(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("count", [2**64 - 1, 10**7])
def test_a_long_array_of_strings_is_refused_at_once(path: Path, count: int) -> None:
    name = b"tokenizer.ggml.tokens"
    at = path.read_bytes().index(name) + len(name) + 4 + 4
    patch(path, at, struct.pack("<Q", count))
    fails(path, "bytes expected, there are")


def test_an_entry_that_is_there_twice_is_named(path: Path) -> None:
    data = path.read_bytes()
    one, other = b"qwen3moe.expert_count", b"qwen3moe.expert_used_count"
    entry = struct.pack("<Q", len(one)) + one + struct.pack("<II", 4, 1)
    at = data.index(other) - 8
    count = int.from_bytes(data[16:24], "little") + 1
    path.write_bytes(data[:16] + struct.pack("<Q", count) + data[24:at] + entry + data[at:])
    fails(path, f"{path} has the entry qwen3moe.expert_count twice")


def offset_of(path: Path, name: str, dims: int) -> int:
    """Where a header says at which byte a tensor begins."""
    return path.read_bytes().index(name.encode()) + len(name) + 4 + dims * 8 + 4


def test_tensors_that_share_bytes_are_named(path: Path) -> None:
    at = offset_of(path, DOWN, 3)
    offset = int.from_bytes(path.read_bytes()[at : at + 8], "little")
    patch(path, at, struct.pack("<Q", offset - 32))
    fails(path, f"{path} is damaged: tensor blk.0.ffn_up_exps.weight ends at byte", DOWN)


def test_a_tensor_that_is_not_aligned_is_named(path: Path) -> None:
    at = offset_of(path, DOWN, 3)
    offset = int.from_bytes(path.read_bytes()[at : at + 8], "little")
    patch(path, at, struct.pack("<Q", offset + 1))
    fails(path, f"tensor {DOWN} begins at byte {offset + 1} of the data, expected a multiple of 32")


@pytest.mark.parametrize("value", [[1, 2], [1.5], "text"])
@pytest.mark.parametrize("name", ["general.type", "split.no", "split.count", "split.tensors.count"])
def test_entries_of_another_type_never_fail_otherwise(
    shards: list[Path], name: str, value: Any
) -> None:
    """Arrays, above all: comparing them gives no answer."""
    for shard in shards:
        data = shard.read_bytes()
        raw = name.encode()
        array = isinstance(value, list)
        body = struct.pack("<Q", 4) + b"text"
        if array:
            body = struct.pack("<IQ", 6, len(value)) + struct.pack(f"<{len(value)}f", *value)
        entry = struct.pack("<Q", len(raw)) + raw + struct.pack("<I", 9 if array else 8) + body
        # The entry that is there is renamed, this one comes first.
        count = int.from_bytes(data[16:24], "little") + 1
        rest = data[24:].replace(raw, raw[:-1] + b"X", 1)
        shard.write_bytes(data[:16] + struct.pack("<Q", count) + entry + rest)
    for path in (shards[0], shards[0].parent):
        try:
            with GgufCheckpoint(path) as checkpoint:
                checkpoint.layer(0)
        except CheckpointError:
            pass
