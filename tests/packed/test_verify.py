"""`ktk verify` finds anything that is wrong, anywhere, and names all of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoints as made
import gguf_files as files
import models
import numpy as np
import pytest
import torch
from checkpoints import BLOCKS, GROUPS, MX, ROWS
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import ktk
from ktk.checkpoint import verify
from ktk.checkpoint.packed import PackedCheckpoint
from ktk.cli import app
from ktk.conversion import convert
from ktk.conversion.compressed import convert_checkpoint
from ktk.errors import CheckpointError
from ktk.ggml import F32, FLOATS, block, not_finite
from ktk.testing import ggml

FILE = "layer-00000.safetensors"
SIZES = (3, 128, 512)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    made.write(folder / "source", layers=(0, 1), sizes=SIZES)
    convert(folder / "source", folder / "packed", backend="AMXINT4")
    return folder


@pytest.fixture
def packed(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound / "packed", tmp_path / "packed"))


def messages(path: Path) -> list[str]:
    """All faults; a file that one is of is named in its sentence."""
    result = verify(path)
    assert result.sound == (not result.faults)
    for fault in result.faults:
        assert fault.file is None or fault.file in fault.message
        assert fault.tensor is None or fault.tensor in fault.message
    return [fault.message for fault in result.faults]


def test_tensors_that_no_index_lists_are_found(tmp_path: Path) -> None:
    """In files without experts, too."""
    source = models.write(tmp_path / "source")
    assert messages(source) == []
    tensors = {"model.norm.weight": torch.ones(4), "rotary.inv_freq": torch.ones(4)}
    save_file(tensors, source / "norms")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = "norms"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    # Of a module that is listed nowhere, as older programs left some.
    assert messages(source) == []
    save_file(tensors | {"model.norm.bias": torch.ones(4)}, source / "norms")
    (message,) = messages(source)
    assert message.startswith(f"{source / 'norms'} holds the tensor model.norm.bias, which ")
    with pytest.raises(CheckpointError, match=r"norms holds the tensor model\.norm\.bias, which"):
        convert_checkpoint(source, tmp_path / "to", to="fp8")
    assert not (tmp_path / "to").exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def at(packed: Path, name: str, expert: int) -> int:
    layout = PackedCheckpoint(packed).layer(0).header.layout
    begin = 8 + int.from_bytes((packed / FILE).read_bytes()[:8], "little")
    return begin + layout.place(name, expert)[0]


def test_what_is_sound_is_read_to_the_last_byte(sound: Path) -> None:
    for path, nbytes in (
        (sound / "source", 2 * 3 * 3 * 128 * 512 * 2),
        (
            sound / "packed",
            sum(PackedCheckpoint(sound / "packed").layer(n).header.layout.nbytes for n in (0, 1)),
        ),
    ):
        steps: list[tuple[int, int, int]] = []
        result = verify(path, on_expert=lambda *step, steps=steps: steps.append(step))
        assert result.sound, result.faults
        assert (result.layers, result.experts, result.nbytes) == ((0, 1), 6, nbytes)
        assert [layer for layer, _, _ in steps] == [0] * 3 + [1] * 3
        assert sum(step for _, step, _ in steps) == nbytes
        assert {total for _, _, total in steps} == {nbytes}


def test_all_flipped_bits_are_named_with_tensor_and_expert(packed: Path) -> None:
    places = [("gate", 0), ("up", 2), ("down", 1), ("down", 2), ("gate_scale", 1), ("up_scale", 0)]
    for name, expert in places:
        flip(packed / FILE, at(packed, name, expert) + 5)
    result = verify(packed)
    assert {(f.layer, f.tensor, f.expert) for f in result.faults} == {(0, *p) for p in places}
    assert all(fault.file == str(packed / FILE) for fault in result.faults)
    assert all("and was written with" in fault.message for fault in result.faults)


def test_missing_and_surplus_layers_are_named(packed: Path) -> None:
    (packed / FILE).unlink()
    shutil.copy(packed / "layer-00001.safetensors", packed / "layer-00007.safetensors")
    found = messages(packed)
    assert any("layer-00007.safetensors is none of the layers" in text for text in found)
    assert any(f"{FILE} is missing" in text for text in found)
    assert len(found) == 2


def test_headers_and_the_index_are_checked(packed: Path) -> None:
    flip(packed / FILE, (packed / FILE).read_bytes().index(b"AMXINT4"))
    [message] = messages(packed)
    assert "the checksum of its header is wrong" in message
    (packed / "ktk_packed.json").write_text("{")
    [message] = messages(packed)
    assert "ktk_packed.json" in message


@pytest.mark.parametrize("fmt", [None, BLOCKS, ROWS, GROUPS, MX], ids=str)
def test_every_tensor_of_a_hub_is_looked_at(tmp_path: Path, fmt: ktk.Format | None) -> None:
    """Each one that has a value that is no number is named when it holds one."""
    source = made.write(tmp_path / "source", fmt)
    assert messages(source) == []
    tensors = load_file(source / "model.safetensors")
    poisoned = 0
    for name, tensor in tensors.items():
        data = tensor.clone().contiguous().view(-1)
        if data.dtype in (torch.bfloat16, torch.float32, torch.float8_e4m3fn):
            data.view(torch.uint8)[-data.itemsize :] = torch.tensor(
                {1: [0x7F], 2: [0x80, 0x7F], 4: [0, 0, 0x80, 0xFF]}[data.itemsize],
                dtype=torch.uint8,
            )
        elif name.endswith(".scale"):
            data[7] = 255
        else:
            continue
        poisoned += 1
        save_file(tensors | {name: data.view_as(tensor)}, source / "model.safetensors")
        [fault] = verify(source).faults
        expert = int(name.split(".experts.")[1].split(".")[0])
        assert (fault.tensor, fault.layer, fault.expert) == (name, 0, expert)
        assert "it holds 1 elements that are infinite or not a number" in fault.message
    assert poisoned >= 9


def test_all_that_headers_show_is_named(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source", layers=(0, 1))
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    del tensors[stem.format(0, 1, "up")]
    tensors[stem.format(0, 2, "down")] = tensors[stem.format(0, 2, "down")].T.contiguous()
    tensors[stem.format(1, 0, "gate")][3, 4] = torch.nan
    save_file(tensors, source / "model.safetensors")
    found = messages(source)
    assert any(stem.format(0, 1, "up") in text and "has no tensor" in text for text in found)
    assert any(stem.format(0, 2, "down") in text and "has shape" in text for text in found)
    assert any(stem.format(1, 0, "gate") in text and "not a number" in text for text in found)
    assert len(found) == 3


def test_what_decoding_refuses_is_named(tmp_path: Path) -> None:
    """As loading would: a tensor alone does not show it."""
    source = made.write(tmp_path / "source", GROUPS)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.2.up_proj.weight_shape"] = torch.tensor([512, 64])
    save_file(tensors, source / "model.safetensors")
    [fault] = verify(source).faults
    assert "holds a matrix of [512, 64], but config.json means [512, 128]" in fault.message
    assert fault.expert == 2


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    [message] = messages(source)
    assert str(path) in message


def test_faults_are_bounded_and_counted(tmp_path: Path) -> None:
    source = made.write(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    save_file(
        {n: torch.full_like(t, torch.inf) for n, t in tensors.items()},
        source / "model.safetensors",
    )
    result = verify(source, most=4)
    assert (len(result.faults), result.more) == (4, 5)
    said = CliRunner().invoke(app, ["verify", str(source)])
    assert said.exit_code == 1
    assert "9 faults; 3 experts in layers 0" in said.output


# --- GGUF ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(FLOATS))
def test_blocks_without_finite_scales_are_those_that_decode_so(kind: str) -> None:
    """Held against the decoders, for random bytes and for scales at the edge."""
    _, nbytes = block(kind)
    rng = np.random.default_rng(1)
    blocks = rng.integers(0, 256, (4096, nbytes), dtype=np.uint8)
    where = FLOATS[kind]
    edge = np.array([0x7C, 0x7B, 0xFC, 0xFB, 0x7D, 0x00, 0xF0, 0xC0], np.uint8)
    blocks[:2048, where.at : where.at + where.size] = rng.choice(edge, (2048, where.size))
    if not ggml.has_nan(kind):
        # Every byte of such a scale is a number, if at times one whose products overflow.
        assert not_finite(blocks.reshape(-1), kind) == 0
        return
    finite = np.isfinite(ggml.decode(kind, blocks)).all(axis=1)
    if where.kind == F32:  # of which some are numbers, but products with them overflow
        scales = blocks[:, where.at : where.at + where.size].copy()
        scales[:1024, 2:] = 0x7F, 0x7F
        scales[1024:2048, 2:] = 0x80, 0xFF
        blocks[:, where.at : where.at + where.size] = scales
        finite = np.isfinite(scales.view("<f4")).all(axis=1)
        assert finite[:1024].all()
    assert not finite.all()
    assert not_finite(blocks.reshape(-1), kind) == np.count_nonzero(~finite)
    for one, good in zip(blocks[::64], np.asarray(finite)[::64], strict=True):
        assert not_finite(one, kind) == int(not good)


@pytest.mark.parametrize("kind", ["Q8_0", "BF16", "F32"])
def test_gguf_files_are_read(tmp_path: Path, kind: str) -> None:
    parts = files.experts(kind, bias=True)
    path = files.write(tmp_path / "a.gguf", files.stacked(parts))
    assert messages(path) == []
    assert verify(path).nbytes == sum(part.data.nbytes for part in parts.values())
    down = parts["down"].data[2].reshape(-1).view(np.uint8)
    down[:4] = 0xFF
    bias = parts["up_bias"].data.reshape(files.E, -1)
    bias[1, 3] = np.inf
    path = files.write(tmp_path / "b.gguf", files.stacked(parts))
    found = verify(path).faults
    assert {(f.layer, f.tensor, f.expert) for f in found} == {
        (0, "blk.0.ffn_down_exps.weight", 2),
        (0, "blk.0.ffn_up_exps.bias", 1),
    }
    data = path.read_bytes()
    path.write_bytes(data[:-1000])
    assert all("truncated" in text for text in messages(path))
    assert messages(path)


# --- the command --------------------------------------------------------------------------------


def test_the_command_ends_with_what_it_found(packed: Path) -> None:
    runner = CliRunner()
    fine = runner.invoke(app, ["verify", str(packed), "--layers", "1"])
    assert fine.exit_code == 0, fine.output
    assert "nothing is wrong; 3 experts in layers 1" in fine.stdout
    assert "layer 1: 0.3 MB of 0.3 MB, 100%" in fine.stderr
    flip(packed / FILE, -1)
    bad = runner.invoke(app, ["verify", str(packed), "--json"])
    assert bad.exit_code == 1
    document = json.loads(bad.stdout)
    assert not document["sound"]
    assert document["layers"] == [0, 1]
    [fault] = document["faults"]
    assert (fault["layer"], fault["expert"]) == (0, 2)
    assert fault["file"] == str(packed / FILE)
    assert runner.invoke(app, ["verify", str(packed), "--layers", "x"]).exit_code == 2
    missing = runner.invoke(app, ["verify", str(packed / "nowhere")])
    assert missing.exit_code == 1
    assert "nowhere is missing" in str(missing.exception)


def test_inspect_says_what_it_does_not_check(packed: Path) -> None:
    runner = CliRunner()
    flip(packed / FILE, -1)
    said = runner.invoke(app, ["inspect", str(packed)])
    assert said.exit_code == 0
    assert "Headers only; ktk verify reads the weights." in said.output
    document = json.loads(runner.invoke(app, ["inspect", str(packed), "--json"]).output)
    assert document["checked"] == "headers"
    assert "ktk verify" in runner.invoke(app, ["inspect", "--help"]).output
