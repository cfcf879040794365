"""A path that is no checkpoint gets a sentence of its own, with what to give instead."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import sound
import torch

import ktk
from ktk.checkpoint import describe, open_checkpoint
from ktk.checkpoint.packed.folder import read_index
from ktk.conversion import convert
from ktk.errors import CheckpointError


def refusal(path: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        ktk.Model.from_checkpoint(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_is_there(tmp_path: Path) -> None:
    for name in ("nowhere", "nowhere/model.gguf", "a/b/c"):
        path = tmp_path / name
        assert refusal(path) == f"{path} is missing: there is no such folder or file"


def test_a_name_of_a_hub_is_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert refusal("Qwen/Qwen3-30B-A3B").endswith(
        "hf download Qwen/Qwen3-30B-A3B puts it into the hub's cache, where "
        "ktk.hub.find_model('Qwen/Qwen3-30B-A3B') finds it"
    )
    # Of a folder that is here, a part is missing.
    (tmp_path / "Qwen").mkdir()
    assert "is missing" in refusal("Qwen/Qwen3-30B-A3B")
    assert "is missing" in refusal("./Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize("name", ["model-1.safetensors", "config.json"])
def test_a_file_of_a_checkpoint_is_in_its_folder(tmp_path: Path, name: str) -> None:
    folder = sound.safetensors(tmp_path / "model")
    assert refusal(folder / name) == (
        f"{folder / name} is one file of a checkpoint: give its folder, {folder}"
    )


def test_the_models_below_a_folder_are_named(tmp_path: Path) -> None:
    a = sound.safetensors(tmp_path / "models" / "a")
    b = sound.gguf(tmp_path / "models" / "b")
    (tmp_path / "models" / "c").mkdir()
    expected = f"is no checkpoint, but a folder of some: give one of {a}, {b}"
    for path in (tmp_path, tmp_path / "models"):
        assert refusal(path) == f"{path} {expected}"
    cached = sound.safetensors(tmp_path / "hub" / "models--x--y" / "snapshots" / "0123")
    assert refusal(tmp_path / "hub").endswith(f"give one of {cached}")
    assert "neither config.json" in refusal(tmp_path / "models" / "c")


def test_many_models_are_not_all_listed(tmp_path: Path) -> None:
    for number in range(7):
        (tmp_path / f"m{number}").mkdir()
        (tmp_path / f"m{number}" / "config.json").write_text("{}")
    message = refusal(tmp_path)
    assert message.endswith("m4 and 2 more")
    assert "m5" not in message


@pytest.mark.parametrize("path", ["x" * 5000, "x/" * 5000, "a\0b"], ids=["name", "folders", "NUL"])
def test_what_no_system_takes_as_a_path_is_one_short_sentence(path: str) -> None:
    message = refusal(path)
    assert len(message) < 500
    assert "cannot be read" in message


def test_a_folder_that_kt_kernel_converted_is_recognized(tmp_path: Path) -> None:
    tensors = {
        f"blk.0.ffn_{part}_exps.{e}.numa.{node}.{what}": torch.zeros(64, dtype=torch.int8)
        for part in ("gate", "up", "down")
        for e in range(3)
        for node in range(2)
        for what in ("weight", "scale")
    }
    folder = sound.safetensors(tmp_path / "converted", tensors)
    expected = (
        f"{folder} was made by kt-kernel's converter for its own kernels: give the checkpoint that "
        "it was made from, as it is or after ktk convert"
    )
    assert refusal(folder) == expected
    for door in (describe, lambda path: convert(path, tmp_path / "out", backend="AMXINT8")):
        with pytest.raises(CheckpointError, match="made by kt-kernel's converter"):
            door(folder)
    with pytest.raises(CheckpointError, match="made by kt-kernel's converter"):
        ktk.MoE.from_checkpoint(folder, 0)


def test_names_that_ktk_does_not_know_are_shown(tmp_path: Path) -> None:
    """What comes nearest is an example."""
    tensors = {
        f"model.layers.{layer}.moe.{part}_matrix.weight": torch.zeros(3, 4, 4)
        for layer in (2, 3)
        for part in ("gate", "up", "down")
    }
    folder = sound.safetensors(tmp_path / "model", {**tensors, "model.norm.weight": torch.ones(4)})
    parts = ("down", "gate", "up")
    names = ", ".join(f"model.layers.2.moe.{part}_matrix.weight" for part in parts)
    with pytest.raises(CheckpointError, match="knows by name in layer 2") as caught:
        ktk.MoE.from_checkpoint(folder, 2)
    assert str(caught.value).endswith(f"it has {names}")
    assert refusal(folder).endswith("it has " + names.replace("layers.2", "layers.*"))


def special(path: Path, kind: str) -> str:
    """Put something in the place of a file; returns what it is."""
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # names of sockets are short
        try:
            socket.socket(socket.AF_UNIX).bind(path.name)
        finally:
            os.chdir(here)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    return f"{path} is a {kind}, expected a file"


SPECIAL = ("FIFO", "socket", "device", "folder")
FILES = {
    "safetensors": ("config.json", "model.safetensors.index.json", "model-1.safetensors"),
    "gguf": ("m.gguf",),
    "packed": ("ktk_packed.json", "layer-00000.safetensors"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize(("model", "name"), [(m, n) for m in FILES for n in FILES[m]])
def test_what_is_no_file_is_refused_at_once(
    tmp_path: Path, model: str, name: str, kind: str
) -> None:
    """FIFOs would wait for ever, and devices never end."""
    folder = sound.KINDS[model](tmp_path / "model")
    expected = special(folder / name, kind)
    assert expected in refusal(folder)


@pytest.mark.parametrize("kind", SPECIAL)
def test_a_gguf_path_that_is_no_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    expected = special(tmp_path / "m.gguf", kind)
    message = refusal(tmp_path / "m.gguf")
    if kind == "folder":
        assert "neither config.json" in message
    else:
        assert expected in message


@pytest.mark.parametrize(
    "file", ["../other/m.safetensors", "/etc/passwd", "a/../../b.safetensors", "", "a\0b", ["x"]]
)
def test_the_index_leads_nowhere_else(tmp_path: Path, file: object) -> None:
    folder = sound.safetensors(tmp_path / "model")
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"] = dict.fromkeys(document["weight_map"], file)
    index.write_text(json.dumps(document))
    message = refusal(folder)
    assert str(index) in message
    assert "expected a file in the same folder" in message or "expected a string" in message


def test_arguments_for_other_files_are_refused(tmp_path: Path) -> None:
    folder = sound.safetensors(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model has a config\.json.* top_k= .* GGUF files"):
        ktk.MoE.from_checkpoint(folder, 0, top_k=1)
    convert(folder, tmp_path / "packed", backend="BF16")
    with pytest.raises(CheckpointError, match="top-k were said when it was converted"):
        open_checkpoint(tmp_path / "packed", top_k=1)


def test_links_of_a_hub_s_cache_are_followed(tmp_path: Path) -> None:
    folder = sound.safetensors(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    with open_checkpoint(snapshot) as checkpoint:
        assert checkpoint.layers() == [0]
    assert sound.read(snapshot).keys() == sound.read(folder).keys()


def test_a_folder_whose_name_is_no_text_is_converted(tmp_path: Path) -> None:
    """Its name goes into files in UTF-8, which have to be read again."""
    source = sound.safetensors(Path(os.fsdecode(os.fsencode(tmp_path) + b"/l\xe9atin")))
    for _ in range(2):
        convert(source, tmp_path / "packed", backend="BF16", resume=True)
    assert ktk.Model.from_checkpoint(tmp_path / "packed").layers
    assert read_index(tmp_path / "packed").source_name == "l?atin"


def test_a_model_of_the_hub_keeps_its_name(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--acme--some--moe" / "snapshots" / "0123abcd"
    convert(sound.safetensors(snapshot), tmp_path / "packed", backend="BF16")
    assert read_index(tmp_path / "packed").source_name == "acme/some--moe"


def test_output_that_cannot_be_spelled_is_printed_all_the_same() -> None:
    code = (
        "import sys; from ktk.__main__ import _print_what_can_be as prepare; prepare();"
        "print('\\xb1 1', '\\udce9')"
    )
    for encoding, wanted in (("ascii", rb"\xb1 1 " + b"\xe9\n"), ("utf-8", b"\xc2\xb1 1 \xe9\n")):
        environment = {**os.environ, "PYTHONIOENCODING": f"{encoding}:strict"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        assert done.stdout == wanted, done.stderr
