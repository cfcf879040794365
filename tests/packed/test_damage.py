"""A file that is not what it was is refused with a sentence that names it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoints as made
import pytest
from safetensors.torch import load_file, save_file

import ktk
from ktk.checkpoint.packed import header as headers
from ktk.cli.contents import inspect
from ktk.conversion import convert
from ktk.errors import BackendNotFound, CheckpointError

FILE = "layer-00000.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conversion of two layers that nobody may change."""
    folder = tmp_path_factory.mktemp("sound")
    source = made.write(folder / "source", layers=(0, 1))
    convert(source, folder / "packed", backend="AMXINT4")
    return folder / "packed"


@pytest.fixture
def packed(sound: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(sound, tmp_path / "packed"))


def refused(folder: Path, message: str) -> None:
    """Loading layer 0 must fail with a sentence that names its file."""
    with pytest.raises(CheckpointError, match=message) as caught:
        ktk.MoE.from_checkpoint(folder, 0)
    assert str(folder / FILE) in str(caught.value)


def header_size(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_a_truncated_file_is_named(packed: Path, keep: float) -> None:
    path = packed / FILE
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    refused(packed, "is damaged or truncated: .*; ktk convert --resume converts the layer again")
    first, second = inspect(packed)
    assert first.error is not None
    assert str(path) in first.error
    assert second.error is None


@pytest.mark.parametrize("name", ["gate", "up", "down", "gate_scale", "up_scale", "down_scale"])
@pytest.mark.parametrize("expert", range(made.E))
def test_a_flipped_bit_is_found_in_any_tensor(packed: Path, name: str, expert: int) -> None:
    path = packed / FILE
    layout = ktk.checkpoint.packed.PackedCheckpoint(packed).layer(0).header.layout
    nbytes = layout.place(name, 0)[1]
    at = header_size(path) + layout.offsets[name] + expert * nbytes + nbytes // 3
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    refused(packed, f"is damaged: tensor {name} of expert {expert} has the checksum")
    ktk.MoE.from_checkpoint(packed, 0, experts=[e for e in range(made.E) if e != expert])


def test_no_bit_of_the_header_matters_unnoticed(sound: Path, packed: Path) -> None:
    """Either the file is refused, or what is loaded is the same."""
    path = packed / FILE
    data = path.read_bytes()
    expected = ktk.MoE.from_checkpoint(sound, 0)
    end = header_size(path)
    refusals = []
    for at in [*range(8), *range(8, end, max(end // 60, 1))]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        try:
            got = ktk.MoE.from_checkpoint(packed, 0)
        except CheckpointError as error:
            refusals.append(str(error))
        else:
            assert got.config == expected.config, f"byte {at}"
            assert made.same_weights(got, expected), f"byte {at}"
    assert len(refusals) > 50
    assert all(str(path) in message for message in refusals)


def rewrite(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """Change what a header says, and make its checksum right."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    document = json.loads(data[8 : 8 + size])
    entries = json.loads(document["__metadata__"]["ktk"])
    change(entries)
    text = json.dumps(entries, separators=(",", ":"))
    document["__metadata__"] |= {
        "ktk": text,
        "ktk_xxh3": f"{headers.checksum(text.encode()):016x}",
    }
    body = json.dumps(document).encode()
    path.write_bytes(len(body).to_bytes(8, "little") + body + data[8 + size :])


def test_another_version_is_named_with_its_writer(packed: Path) -> None:
    rewrite(packed / FILE, lambda entries: entries.update(version=3, writer="ktk 9.9"))
    refused(packed, "has version 3 of ktk's packed files, .* reads versions up to 2: .* by ktk 9.9")


def test_other_sizes_than_those_of_the_tensors_are_named(packed: Path) -> None:
    def change(entries: dict[str, object]) -> None:
        assert isinstance(entries["config"], dict)
        entries["config"]["hidden_size"] = made.H + 32

    rewrite(packed / FILE, change)
    refused(packed, r"tensor \w+ is \w+ \[3, \d+, \d+\], but its header means \w+ \[3, \d+, \d+\]")


def test_a_file_of_another_conversion_is_named(packed: Path, tmp_path: Path) -> None:
    other = made.write(tmp_path / "other", layers=(0,))
    convert(other, tmp_path / "elsewhere", backend="AMXINT4")
    shutil.copy(tmp_path / "elsewhere" / FILE, packed / FILE)
    refused(packed, "is of another conversion than the rest of the folder: its source is")


def test_a_file_under_the_name_of_another_is_named(packed: Path) -> None:
    shutil.copy(packed / "layer-00001.safetensors", packed / FILE)
    refused(packed, "holds layer 1, its name says 0")


def test_safetensors_of_others_are_named(packed: Path) -> None:
    tensors = load_file(packed / FILE)
    save_file(tensors, packed / FILE, metadata={"format": "pt"})
    refused(packed, "is no packed file of ktk")


def test_a_layer_that_is_still_to_come_is_named(packed: Path) -> None:
    (packed / FILE).unlink()
    refused(packed, r"is missing: .* run it again with --resume")
    first, second = inspect(packed)
    assert first.error is not None
    assert f"{FILE} is missing" in first.error
    assert second.error is None


def test_a_layer_that_was_not_asked_for_is_named(packed: Path) -> None:
    with pytest.raises(CheckpointError, match=r"packed has no layer 7; .* layers 0, 1"):
        ktk.MoE.from_checkpoint(packed, 7)


def test_another_backend_that_stores_the_same_is_welcome(packed: Path) -> None:
    moe = ktk.MoE.from_checkpoint(packed, 0, "RAWINT4")
    assert made.same_weights(moe, ktk.MoE.from_checkpoint(packed, 0, "AMXINT4"))


def test_a_backend_that_is_not_installed_is_named(packed: Path) -> None:
    rewrite(packed / FILE, lambda entries: entries.update(backend="AMXINT5"))
    index = packed / "ktk_packed.json"
    index.write_text(index.read_text().replace("AMXINT4", "AMXINT5"))
    with pytest.raises(BackendNotFound, match="AMXINT5"):
        ktk.MoE.from_checkpoint(packed, 0)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r".*", "", "cannot be read"),
        (r'"version": 1', '"version": 7', "has version 7"),
        (r'"layers"', '"players"', "is damaged"),
    ],
)
def test_a_damaged_index_is_named(
    packed: Path, pattern: str, replacement: str, message: str
) -> None:
    index = packed / "ktk_packed.json"
    index.write_text(re.sub(pattern, replacement, index.read_text(), flags=re.DOTALL))
    with pytest.raises(CheckpointError, match=rf"ktk_packed\.json.* {message}"):
        ktk.MoE.from_checkpoint(packed, 0)


def stamps(folder: Path) -> dict[str, int]:
    """When each layer was made."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("layer-*.safetensors")}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda path: flip(path, header_size(path)), id="first byte"),
        pytest.param(lambda path: flip(path, -1), id="last byte"),
        pytest.param(lambda path: flip(path, path.read_bytes().index(b"AMXINT4")), id="header"),
        pytest.param(truncate, id="truncated"),
    ],
)
def test_a_damaged_layer_is_converted_again(
    packed: Path, sound: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    before = stamps(packed)
    damage(packed / FILE)
    plans = convert(sound.parent / "source", packed, backend="AMXINT4", resume=True)
    assert [plan.done for plan in plans] == [False, True]
    [message] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert re.match(rf"layer 0 has to be converted again: .*{FILE} is damaged", message)
    assert made.contents(packed) == made.contents(sound)
    after = stamps(packed)
    assert after["layer-00001.safetensors"] == before["layer-00001.safetensors"]


def test_files_that_are_no_damage_are_not_written_over(packed: Path, sound: Path) -> None:
    source = sound.parent / "source"
    tensors = load_file(packed / FILE)
    save_file(tensors, packed / FILE, metadata={"format": "pt"})
    before = made.contents(packed)
    with pytest.raises(CheckpointError, match=f"{FILE} is no packed file of ktk"):
        convert(source, packed, backend="AMXINT4", resume=True)
    assert made.contents(packed) == before
    shutil.copy(packed / "layer-00001.safetensors", packed / FILE)
    before = made.contents(packed)
    with pytest.raises(CheckpointError, match=f"{FILE} is of another conversion: remove it"):
        convert(source, packed, backend="AMXINT4", resume=True)
    assert made.contents(packed) == before
