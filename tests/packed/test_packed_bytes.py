"""Files keep packed bytes that are fewer because of what is in them: of BF16Z and of others."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import checkpoints as made
import pytest
import torch
from safetensors.torch import load_file, save_file

import ktk
from ktk.checkpoint import verify
from ktk.checkpoint.packed import header as headers
from ktk.checkpoint.packed.codec import kept_layout
from ktk.checkpoint.packed.layer import PackedLayer, open_layer
from ktk.cli.contents import inspect
from ktk.conversion import convert
from ktk.errors import CheckpointError

MUTANTS = Path(__file__).parents[1] / "mutants"
FILE = "layer-00000.safetensors"
SIZES = (3, 256, 768)  # several steps for each block of columns
PLUGIN = """
import ctypes, pathlib
_library = ctypes.CDLL(str(pathlib.Path(__file__).with_name("libsized.so")))
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
def __ktk_backend__():
    table = ctypes.c_char.in_dll(_library, "sized")
    return _new(ctypes.addressof(table), b"ktk.backend", None)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers; of the first, one matrix has any exponents, and one is zero, of either sign."""
    folder = made.write(tmp_path_factory.mktemp("source"), layers=(0, 1), sizes=SIZES)
    tensors = load_file(folder / "model.safetensors")
    stem = "model.layers.0.mlp.experts."
    gate, down = (tensors[f"{stem}{name}_proj.weight"] for name in ("1.gate", "2.down"))
    generator = torch.Generator().manual_seed(0)
    gate.view(torch.int16).random_(0, 0x4000, generator=generator)
    down.zero_()
    down[::3] = -0.0
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def sound(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its conversion, which nobody may change."""
    folder = tmp_path_factory.mktemp("packed")
    convert(source, folder, backend="BF16Z")
    return folder


@pytest.fixture
def packed(sound: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(sound, tmp_path / "packed"))


def layer_of(folder: Path, number: int = 0) -> PackedLayer:
    return open_layer(folder / f"layer-{number:05d}.safetensors")


def same_bits(ours: Path, theirs: Path, layer: int) -> bool:
    """Whether the experts of two checkpoints are the same, signs of zeros included."""
    with ktk.checkpoint.open_checkpoint(ours) as a, ktk.checkpoint.open_checkpoint(theirs) as b:
        pairs = [
            (one.matrices[part].data, other.matrices[part].data)
            for number in range(SIZES[0])
            for one, other in [(a.layer(layer).expert(number), b.layer(layer).expert(number))]
            for part in made.PARTS
        ]
    assert all(x.dtype == y.dtype == torch.bfloat16 for x, y in pairs)
    return all(torch.equal(x.view(torch.int16), y.view(torch.int16)) for x, y in pairs)


def test_a_file_has_12_bits_for_a_weight_and_gives_the_checkpoint_back(
    source: Path, sound: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path, backend="BF16")
    plain, ours = (
        (folder / "layer-00001.safetensors").stat().st_size for folder in (tmp_path, sound)
    )
    assert ours <= 12.25 / 16 * plain
    assert all(same_bits(sound, source, layer) for layer in (0, 1))
    for layer in (0, 1):
        direct = ktk.MoE.from_checkpoint(source, layer, "BF16")
        for shards in (1, 2):
            loaded = ktk.MoE.from_checkpoint(sound, layer, shards=shards)
            assert loaded.backend.name == "BF16Z"
            assert made.same_weights(loaded, direct)
            assert torch.equal(
                made.outputs(loaded),
                made.outputs(ktk.MoE.from_checkpoint(source, layer, "BF16", shards=shards)),
            )
    assert verify(sound).sound
    assert [report.error for report in inspect(sound)] == [None, None]


def test_what_does_not_fit_takes_more_and_disturbs_no_other(sound: Path) -> None:
    usual, mixed = (layer_of(sound, number).header.layout.packed for number in (1, 0))
    first = usual["gate"].sizes[0]
    n, k = SIZES[2], SIZES[1]
    assert set(usual["gate"].sizes) == {first} < {first, 64 + 2 * n * k} == set(mixed["gate"].sizes)
    assert mixed["gate"].sizes[1] == 64 + 2 * n * k
    assert mixed["down"] == usual["down"]


def test_any_cpu_that_runs_the_backend_reads_the_files() -> None:
    """One layout for all variants of all instruction sets, those of this CPU and others."""
    backend = ktk.load_backend("BF16Z")
    assert kept_layout(backend) == "bf16z-n32k32-x12"
    assert len(backend.variants) > 1
    assert kept_layout(ktk.load_backend("BF16")) is None


def test_variants_pack_the_same_bytes(source: Path, sound: Path) -> None:
    """And those that run here are told from each other by nothing in a file."""
    backend = ktk.load_backend("BF16Z")
    with ktk.checkpoint.open_checkpoint(source) as checkpoint:
        expert = checkpoint.layer(0).expert(1)
    for part, matrix in expert.matrices.items():
        kept = [
            ktk._core.PackedMatrix(backend.core, variant.name, matrix.data).buffer.tobytes()
            for variant in backend.variants
            if variant.runnable
        ]
        spec = layer_of(sound).header.layout
        begin, nbytes = spec.place(part, 1)
        start = len(headers.to_bytes(layer_of(sound).header))
        assert set(kept) == {(sound / FILE).read_bytes()[start + begin :][:nbytes]}


def test_files_do_not_depend_on_threads_and_resume_keeps_them(
    source: Path, sound: Path, packed: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "one", backend="BF16Z", threads=1)
    for number in (0, 1):
        name = f"layer-{number:05d}.safetensors"
        assert (tmp_path / "one" / name).read_bytes() == (sound / name).read_bytes()
    assert [plan.done for plan in convert(source, packed, backend="BF16Z", resume=True)] == [
        True
    ] * 2
    (packed / FILE).unlink()
    plans = convert(source, packed, backend="BF16Z", resume=True)
    assert [plan.done for plan in plans] == [False, True]
    assert [plan.nbytes for plan in plans] == [plan.path.stat().st_size for plan in plans]
    assert (packed / FILE).read_bytes() == (sound / FILE).read_bytes()


@pytest.mark.parametrize("part", made.PARTS)
@pytest.mark.parametrize("expert", range(SIZES[0]))
def test_damage_is_named_and_converted_again(
    source: Path, sound: Path, packed: Path, part: str, expert: int
) -> None:
    header = layer_of(packed).header
    begin, nbytes = header.layout.place(part, expert)
    data = bytearray((packed / FILE).read_bytes())
    data[len(headers.to_bytes(header)) + begin + nbytes // 3] ^= 0x10
    (packed / FILE).write_bytes(data)
    what = f"tensor {part} .*expert {expert}"
    with pytest.raises(CheckpointError, match=f"{FILE} is damaged: {what} has the checksum"):
        ktk.MoE.from_checkpoint(packed, 0)
    [fault] = [one for one in verify(packed).faults if one.tensor]
    assert (fault.tensor, fault.expert) == (part, expert)
    plans = convert(source, packed, backend="BF16Z", resume=True)
    assert [plan.done for plan in plans] == [False, True]
    assert (packed / FILE).read_bytes() == (sound / FILE).read_bytes()


def endless_patches(matrix: memoryview) -> None:
    """A count of patches that reaches behind all of them."""
    matrix[32:34] = b"\xff\xff"


def patches_out_of_order(matrix: memoryview) -> None:
    """Two patches in the first block: one of the second group, then one of the first."""
    k, steps = SIZES[1], SIZES[1] // 32
    block = 64 + steps * 1536
    side = SIZES[2] // 32 * block
    assert len(matrix) == side + SIZES[2] // 32 * k // 2
    matrix[20:24] = (2).to_bytes(4, "little")
    matrix[32 : 32 + 2 * steps] = (2).to_bytes(2 * steps, "little")
    matrix[side : side + 8] = (64 << 16).to_bytes(4, "little") + bytes(4)


@pytest.mark.parametrize("fault", [endless_patches, patches_out_of_order])
def test_bytes_that_are_no_packed_weights_are_refused_before_they_are_read(
    packed: Path, fault: Callable[[memoryview], None]
) -> None:
    """A file whose checksums are right may hold anything."""
    path, header = packed / FILE, layer_of(packed).header
    start = len(headers.to_bytes(header))
    begin, nbytes = header.layout.place("up", 0)
    data = bytearray(path.read_bytes())
    fault(memoryview(data)[start + begin :][:nbytes])
    sums = {name: list(found) for name, found in header.checksums.items()}
    sums["up"][0] = headers.checksum(bytes(data[start + begin :][:nbytes]))
    wrong = headers.Header(**{**vars(header), "checksums": sums})
    data[:start] = headers.to_bytes(wrong)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"up of expert 0 in .* are no weight \[768, 256\]"):
        ktk.MoE.from_checkpoint(packed, 0)
    assert any("are no weight" in fault.message for fault in verify(packed).faults)


def test_a_layout_that_nothing_here_reads_is_named(packed: Path) -> None:
    path, header = packed / FILE, layer_of(packed).header
    data = path.read_bytes()[len(headers.to_bytes(header)) :]
    for spec in header.layout.packed.values():
        object.__setattr__(spec, "layout", "bf16z-n32k32-x13")
    path.write_bytes(headers.to_bytes(header) + data)
    with pytest.raises(CheckpointError, match="reads the packed layout bf16z-n32k32-x13"):
        ktk.MoE.from_checkpoint(packed, 0)


def test_weights_that_are_not_finite_are_told(source: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(source, tmp_path / "source"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "packed", backend="BF16Z", layers=[1])
    [fault] = verify(tmp_path / "packed").faults
    assert "up of expert 2" in fault.message
    assert "1 elements that are infinite or not a number" in fault.message


def test_a_backend_of_somebody_else_has_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix of zeros alone takes a line in its packed form, any other one a line more."""
    site = tmp_path / "site"
    (site / "sized-1.0.dist-info").mkdir(parents=True)
    (site / "sized-1.0.dist-info" / "METADATA").write_text("Name: sized\nVersion: 1.0\n")
    entry = "[ktk.backends]\nSIZED = sized_plugin\n"
    (site / "sized-1.0.dist-info" / "entry_points.txt").write_text(entry)
    (site / "sized_plugin.py").write_text(PLUGIN)
    flags = ["-std=gnu11", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    command = ["cc", *flags, "-isystem", ktk.get_include(), str(MUTANTS / "sized.c")]
    subprocess.run([*command, "-o", site / "libsized.so", "-lm"], check=True)
    monkeypatch.syspath_prepend(site)
    folder = made.write(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.experts.1.up_proj.weight"].zero_()
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "packed", backend="SIZED")
    sizes = layer_of(tmp_path / "packed").header.layout.packed["up"].sizes
    assert sizes[1] == 64 < sizes[0] == sizes[2]
    loaded = ktk.MoE.from_checkpoint(tmp_path / "packed", 0)
    assert loaded.backend.name == "SIZED"
    assert made.same_weights(loaded, ktk.MoE.from_checkpoint(folder, 0, "BF16"))
    index = json.loads((tmp_path / "packed" / "ktk_packed.json").read_text())
    assert index["backend"] == "SIZED"
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match=r"is packed, and cannot be read: .*SIZED"):
        ktk.MoE.from_checkpoint(tmp_path / "packed", 0, "BF16")
