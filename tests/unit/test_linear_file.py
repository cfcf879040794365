"""ktk.Linear.save and from_file: the same bits again, and a sentence for whatever is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk.checkpoint.packed import linear as linear_file
from ktk.errors import BackendError, CheckpointError
from ktk.quantize import quantize

N, K = 200, 256


def exporting() -> list[str]:
    """Return the backends that give back what they packed."""
    found = []
    for name in sorted(ktk.backends()):
        try:
            backend = ktk.load_backend(name)
        except BackendError:
            continue
        chosen = backend.core.default_variant()
        if any(one.exports for one in backend.variants if one.name == chosen):
            found.append(name)
    return found


def weights(backend: Any, rows: list[int]) -> list[Any]:
    """Return parts that a backend takes."""
    generator = torch.Generator().manual_seed(0)
    made: list[Any] = [torch.randn(n, K, generator=generator) for n in rows]
    floats = any(fmt.element in ("f32", "bf16") for fmt in backend.accepts)
    return made if floats else [quantize(one, backend.formats[0]) for one in made]


def make(name: str, rows: list[int], **options: Any) -> ktk.Linear:
    layer = ktk.Linear(name, K, sum(rows), **options)
    biases = [torch.arange(n) / 8 for n in rows] if layer.bias else None
    return layer.load(weights(layer.backend, rows), bias=biases)


def check_same(found: ktk.Linear, wanted: ktk.Linear) -> None:
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert (found.in_features, found.out_features) == (wanted.in_features, wanted.out_features)
    assert [str(fmt) for fmt in found.formats] == [str(fmt) for fmt in wanted.formats]
    assert np.array_equal(found.unpack(), wanted.unpack())
    assert torch.equal(found(x), wanted(x))


@pytest.fixture(params=["AMXINT8", "BF16Z"])
def any_saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "layer.safetensors"
    make(request.param, [64, 32], bias=True).save(path)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "layer.safetensors"
    make("AMXINT8", [64, 32], bias=True).save(path)
    return path


def test_backends_that_export() -> None:
    assert {"AMXINT4", "AMXINT8", "BF16", "FP8", "RAWINT4"} <= set(exporting())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", exporting())
def test_the_same_bits_come_back(name: str, bias: bool, tmp_path: Path) -> None:
    for number, rows in enumerate(([N], [128, 32, 97])):
        wanted = make(name, rows, bias=bias)
        path = tmp_path / f"{number}.safetensors"
        wanted.save(path)
        found = ktk.Linear.from_file(path)
        assert found.backend.name == name
        assert found.bias == bias
        check_same(found, wanted)


def test_shards_are_no_property_of_a_file(tmp_path: Path) -> None:
    # Rows of 1, groups of 128 of them, and rows that share a table of exponents.
    for name in ("AMXINT8", "FP8", "BF16Z"):
        wanted = make(name, [N, 300], shards=2)
        path = tmp_path / f"{name}.safetensors"
        wanted.save(path)
        check_same(ktk.Linear.from_file(path, shards=1), wanted)
        again = tmp_path / "again.safetensors"
        ktk.Linear.from_file(path, shards=1).save(again)
        assert again.read_bytes() == path.read_bytes()


def test_any_damage_is_found(any_saved: Path) -> None:
    sound = any_saved.read_bytes()
    for at in range(0, len(sound), 211):
        broken = bytearray(sound)
        broken[at] ^= 0xFF
        any_saved.write_bytes(broken)
        with pytest.raises(CheckpointError, match=r"layer\.safetensors"):
            ktk.Linear.from_file(any_saved)
    for length in (0, 7, 8, 100, len(sound) // 2, len(sound) - 1):
        any_saved.write_bytes(sound[:length])
        with pytest.raises(CheckpointError, match=r"layer.safetensors is damaged or truncated"):
            ktk.Linear.from_file(any_saved)
    any_saved.write_bytes(sound)
    ktk.Linear.from_file(any_saved)


def test_a_backend_of_fewer_bits_saves_as_many(tmp_path: Path) -> None:
    plain, path = tmp_path / "plain.safetensors", tmp_path / "layer.safetensors"
    make("BF16", [512]).save(plain)
    wanted = make("BF16Z", [512])
    wanted.save(path)
    header = 1024
    assert path.stat().st_size < wanted.nbytes + header < 0.8 * plain.stat().st_size
    check_same(ktk.Linear.from_file(path, "BF16"), make("BF16", [512]))


def test_packed_bytes_that_nothing_here_reads_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "layer.safetensors"
    monkeypatch.setattr(linear_file, "kept_layout", lambda _: "another-layout")
    make("BF16Z", [64]).save(path)
    with pytest.raises(BackendError, match="reads the packed layout another-layout"):
        ktk.Linear.from_file(path)


def test_other_files_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"none.safetensors"):
        ktk.Linear.from_file(tmp_path / "none.safetensors")
    save_file({"weight": torch.ones(4, 4)}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="is no file of a dense layer"):
        ktk.Linear.from_file(tmp_path / "other.safetensors")
    monkeypatch.setattr(linear_file, "VERSION", 3)
    make("BF16", [64]).save(tmp_path / "new.safetensors")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"version 3 .* versions up to 2: .* written by ktk"):
        ktk.Linear.from_file(tmp_path / "new.safetensors")


def test_another_backend_takes_it_or_says_why_not(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"layer.safetensors was written for AMXINT8: .*"):
        ktk.Linear.from_file(saved, "FP8")
    with pytest.raises(BackendError, match="NONE"):
        ktk.Linear.from_file(saved, "NONE")


def test_what_cannot_be_saved_says_so(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    with pytest.raises(ValueError, match="no weight is loaded"):
        ktk.Linear("BF16", 64, 64).save(path)
    blocks = np.zeros((64, K // 32 * 34), np.uint8)
    layer = ktk.Linear("LLAMAFILE", K, 64).load(blocks, given="q8_0")
    with pytest.raises(ValueError, match=r"LLAMAFILE.* cannot export weights"):
        layer.save(path)
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_the_file_that_was_there(saved: Path) -> None:
    before = saved.read_bytes()
    program = f"""
import os, signal, numpy, ktk
from ktk.durable import PendingFile
PendingFile.commit = lambda self: os.kill(os.getpid(), signal.SIGKILL)
ktk.Linear("BF16", 64, 64).load(numpy.ones((64, 64), numpy.float32)).save({str(saved)!r})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == -9
    assert saved.read_bytes() == before
    # What it left is overwritten.
    make("BF16", [64]).save(saved)
    assert ktk.Linear.from_file(saved).backend.name == "BF16"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
