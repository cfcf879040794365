"""Files that change while they are read give an error that names them, and never a signal."""

from __future__ import annotations

import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sound
import torch

import ktk
from ktk.checkpoint.files import File
from ktk.errors import CheckpointError


def digest(model: ktk.Model) -> str:
    """Return a digest of all weights."""
    found = hashlib.sha256()
    for number in model.layers:
        for expert in range(model[number].config.num_experts):
            for array in model[number].unpack_expert(expert):
                assert array is not None
                found.update(array.tobytes())
    return found.hexdigest()


# The reader is one expert ahead, so most experts are still in the file.
_LOADING = f"""
import hashlib
import sys
from pathlib import Path
import ktk
from ktk.errors import CheckpointError

{inspect.getsource(digest)}
path, how = Path(sys.argv[1]), sys.argv[2]
weights = [one for one in path.iterdir() if one.suffix in (".safetensors", ".gguf")]
pack = ktk.MoE.load_expert

def packing(moe, slot, *args, **named):
    for one in weights if slot == 0 else ():
        if how == "truncated":
            with one.open("r+b") as file:
                file.truncate(one.stat().st_size // 8)
        elif how == "written over":
            with one.open("r+b") as file:
                file.seek(-1, 2)
                file.write(b"x")
        else:
            new = one.with_suffix(".new")
            new.write_bytes(one.read_bytes()[::-1])
            new.replace(one)
    pack(moe, slot, *args, **named)

ktk.MoE.load_expert = packing
try:
    model = ktk.Model.from_checkpoint(path)
except CheckpointError as error:
    print(error)
else:
    print(digest(model), end="")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf", "packed"])
@pytest.mark.parametrize("how", ["truncated", "written over"])
def test_a_file_that_changes_while_it_is_loaded_is_named(
    tmp_path: Path, kind: str, how: str
) -> None:
    folder = sound.KINDS[kind](tmp_path / "model")
    [weights] = [one for one in folder.iterdir() if one.suffix in (".safetensors", ".gguf")]
    done = subprocess.run(
        [sys.executable, "-c", _LOADING, str(folder), how],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{weights} has changed since it was opened" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["safetensors", "gguf", "packed"])
def test_a_file_that_is_exchanged_while_it_is_loaded_is_read_to_its_end_or_named(
    tmp_path: Path, kind: str
) -> None:
    folder = sound.KINDS[kind](tmp_path / "model")
    expected = ktk.Model.from_checkpoint(folder)
    found = subprocess.run(
        [sys.executable, "-c", _LOADING, str(folder), "exchanged"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout == digest(expected)


def test_a_file_that_was_closed_and_exchanged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    os.utime(path, ns=(1, 1))
    file = File(path)
    assert file.read(2, 3).tobytes() == b"234"
    file.close()
    (tmp_path / "other").write_bytes(b"9876543210")
    (tmp_path / "other").replace(path)
    with pytest.raises(CheckpointError, match=f"{path} has changed since it was opened"):
        file.read(2, 3)


def test_what_lies_behind_the_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    with pytest.raises(CheckpointError, match=f"{path} is truncated: byte 11 is needed, it has 10"):
        File(path).read(8, 3)


@pytest.mark.parametrize("kind", sound.KINDS)
def test_nothing_is_mapped(tmp_path: Path, kind: str) -> None:
    folder = sound.KINDS[kind](tmp_path / "model")
    with ktk.checkpoint.open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(checkpoint.layers()[0])
        arrays = layer.expert(1).arrays()
        assert str(folder) not in Path("/proc/self/maps").read_text()
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert any(name.startswith(str(folder)) for name in opened)
        checkpoint.close()
        opened = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        assert not any(name.startswith(str(folder)) for name in opened)
        again = layer.expert(1).arrays()
    assert arrays.keys() == again.keys()
    assert all(torch.equal(arrays[name], again[name]) for name in arrays)


def test_tensors_at_odd_addresses_of_a_file_are_aligned_in_memory(tmp_path: Path) -> None:
    """As a header whose length is no multiple of the elements' size puts them."""
    folder = sound.fp8(tmp_path / "model")
    expected = sound.read(folder)
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    path.write_bytes(
        (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    )
    with ktk.checkpoint.open_checkpoint(folder) as checkpoint:
        for tensor in checkpoint.layer(0).expert(1).arrays().values():
            assert tensor.data_ptr() % tensor.element_size() == 0
    assert all(torch.equal(tensor, expected[name]) for name, tensor in sound.read(folder).items())
