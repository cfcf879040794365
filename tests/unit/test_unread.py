"""Workers read what they pack: the same experts, and errors that name the file."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import unread_experts
from safetensors.torch import load_file, save_file
from schemes import NAMES, SCHEMES, E, sources, tensors_of, write

import ktk
from ktk.checkpoint import files
from ktk.checkpoint.open import open_checkpoint
from ktk.errors import CheckpointError
from ktk.loading import load_moe
from ktk.unread import Unread, UnreadExpert

HIDDEN, INNER = 1024, 256  # what a worker has of a matrix is read in two parts
LAYER = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = torch.Generator().manual_seed(1)
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    tensors = {
        NAMES[part].format(e=e) + ".weight": torch.randn(shape, generator=generator).bfloat16()
        for e in range(E)
        for part, shape in shapes.items()
    }
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER}
    return write(tmp_path_factory.mktemp("model"), tensors, {}, **sizes)


@pytest.fixture
def reads() -> Iterator[list[int]]:
    """How many bytes are left to workers, expert by expert."""
    found: list[int] = []
    reading = Unread.reading

    def watched(self: Unread) -> object:
        found.append(sum(memory.size for _, _, memory in self._reads))
        return reading(self)

    with mock.patch.object(Unread, "reading", watched):
        yield found


def stored(moe: ktk.MoE, e: int) -> list[np.ndarray]:
    return [np.asarray(part) for part in moe.unpack_expert(e)]


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("backend", ["BF16", "BF16Z", "AMXINT8", "AMXINT4", "LLAMAFILE"])
def test_a_layer_is_the_same(
    folder: Path, reads: list[int], backend: str, threads: int, shards: int
) -> None:
    """With what columns are cut from, and where sizes depend on values: then all is read first."""
    pool = ktk.WorkerPool(threads=threads)
    moe = load_moe(folder, LAYER, backend, pool=pool, shards=shards)
    assert reads == [3 * 2 * HIDDEN * INNER] * E
    other = ktk.MoE(moe.backend, moe.config, pool=pool, shards=shards)
    with open_checkpoint(folder) as checkpoint:
        for e in range(E):
            other.load_expert(e, checkpoint.layer(LAYER).expert(e))
            for got, expected in zip(stored(moe, e), stored(other, e), strict=True):
                np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["fp8 by blocks", "mxfp8", "int8 by rows", "mxfp4", "nvfp4"])
def test_codes_are_left_to_workers_and_scales_are_not(
    tmp_path: Path, reads: list[int], name: str
) -> None:
    fmt, make, config = SCHEMES[name]
    matrices = sources(fmt)
    write(tmp_path, tensors_of(matrices, make), config)
    with mock.patch.object(files, "LEAST_KEPT", 1):
        moe = load_moe(tmp_path, LAYER)
    codes = {
        e: sum(
            load_file(tmp_path / "model.safetensors")[key].nbytes
            for key in tensors_of(matrices, make)
            if f".{e}." in key and "scale" not in key
        )
        for e in range(E)
    }
    assert reads == list(codes.values())
    for (part, e), source in matrices.items():
        got = dict(zip(("gate", "up", "down"), stored(moe, e), strict=True))[part]
        np.testing.assert_array_equal(got, source.values.astype(np.float32))


def changed(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [changed, cut])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_file_that_changes_meanwhile_is_named(
    tmp_path: Path, folder: Path, damage: object, shards: int
) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(LAYER)
        moe = ktk.MoE(ktk.load_backend("BF16"), layer.config.layer(), shards=shards)
        moe.load_expert(0, layer.unread(0))
        late = [layer.unread(e) for e in range(E)]
        damage(tmp_path / "model.safetensors")  # type: ignore[operator]
        for e, expert in enumerate(late):
            with pytest.raises(CheckpointError, match=r"model.safetensors has changed since it"):
                moe.load_expert(e, expert)
    assert moe._core.loaded == []


def test_an_error_of_the_system_is_named(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        moe = ktk.MoE(ktk.load_backend("BF16"), layer.config.layer())
        expert = layer.unread(0)
        assert isinstance(expert, UnreadExpert)
        file = expert.unread._reads[1][0]
        number, file.number = file.number, os.open(folder, os.O_RDONLY)
        message = r"model.safetensors cannot be read: Is a directory"
        try:
            with pytest.raises(CheckpointError, match=message):
                moe.load_expert(0, expert)
        finally:
            os.close(file.number)
            file.number = number
        assert moe._core.loaded == []
        moe.load_expert(0, layer.unread(0))
        assert moe._core.loaded == [0]


def test_modes_of_torch_do_not_matter(folder: Path) -> None:
    with torch.inference_mode(), torch.device("meta"), open_checkpoint(folder) as checkpoint:
        assert unread_experts.assert_same(checkpoint.layer(LAYER), 0) == 3 * 2 * HIDDEN * INNER


def test_memory_of_no_matrix_or_of_a_part_is_refused(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        moe = ktk.MoE(ktk.load_backend("BF16"), layer.config.layer())
        expert, other = layer.expert(0), layer.unread(1)
        assert isinstance(other, UnreadExpert)
        with pytest.raises(ValueError, match="bytes of no matrix"):
            moe.load_expert(0, UnreadExpert.of(expert, other.unread))
        part = Unread()
        [(file, begin, memory), *_] = other.unread._reads
        part.add(file, begin, memory[: memory.size // 2])
        with pytest.raises(ValueError, match="a part of a matrix, which must be all or nothing"):
            moe.load_expert(0, UnreadExpert.of(other, part))
        assert moe._core.loaded == []


def test_names_of_files_may_be_any_bytes(tmp_path: Path, folder: Path) -> None:
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/m\xff"))
    odd.mkdir()
    for path in folder.iterdir():
        (odd / path.name).write_bytes(path.read_bytes())
    moe = load_moe(odd, LAYER, "BF16")
    for got, expected in zip(
        stored(moe, 1), stored(load_moe(folder, LAYER, "BF16"), 1), strict=True
    ):
        np.testing.assert_array_equal(got, expected)


def test_the_error_of_a_handler_of_signals_stays_what_it_is(folder: Path) -> None:
    with open_checkpoint(folder) as checkpoint:
        expert = checkpoint.layer(LAYER).unread(0)
        assert isinstance(expert, UnreadExpert)
        with pytest.raises(TimeoutError, match="too long"), expert.unread.reading():
            raise TimeoutError("too long")


def test_a_slot_that_was_left_out_stays_so_if_a_file_has_changed(
    tmp_path: Path, folder: Path
) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(LAYER)
        moe = ktk.MoE(ktk.load_backend("LLAMAFILE"), layer.config.layer())
        for e in range(E):
            moe.leave_out(e)
        expert = layer.unread(0)
        changed(tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match="has changed since"):
            moe.load_expert(0, expert)
    # As if nobody had tried: others may decide what is stored, and rows that want it get nothing.
    assert moe._core.loaded == []
    assert moe(torch.ones(1, HIDDEN), torch.tensor([[0]]), torch.ones(1, 1)).abs().sum() == 0
    gate_up = torch.ones(INNER, HIDDEN)
    moe.load_expert(1, gate_up, gate_up, gate_up.T.contiguous())
    assert (str(moe.format), moe._core.loaded) == ("f32", [1])


def test_a_damaged_expert_does_not_matter_to_others(tmp_path: Path) -> None:
    fmt, make, config = SCHEMES["int4"]
    matrices = sources(fmt)
    tensors = tensors_of(matrices, make)
    name = NAMES["down"].format(e=0) + ".weight_shape"
    write(tmp_path, {**tensors, name: tensors[name] + 1}, config)
    assert load_moe(tmp_path, LAYER, experts=[1])._core.loaded == [1]
    with pytest.raises(CheckpointError, match=r"experts.0.down_proj"):
        load_moe(tmp_path, LAYER, experts=[0])


def test_memory_of_what_is_unread_is_not_touched(tmp_path: Path) -> None:
    """Bytes go through the caches of cores: an expert that is being packed takes no memory."""
    size = 2048
    parts = {part: torch.zeros(size, size, dtype=torch.bfloat16) for part in ("gate", "up", "down")}
    tensors = {NAMES[part].format(e=0) + ".weight": tensor for part, tensor in parts.items()}
    sizes = {"hidden_size": size, "moe_intermediate_size": size, "num_experts": 1}
    write(tmp_path, tensors, {}, **sizes)
    with open_checkpoint(tmp_path) as checkpoint:
        moe = ktk.MoE(ktk.load_backend("BF16"), checkpoint.layer(LAYER).config.layer())
        first = checkpoint.layer(LAYER).unread(0)  # and stays, so that its memory is not lent again
        moe.load_expert(0, first)
        expert = checkpoint.layer(LAYER).unread(0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        moe.load_expert(0, expert)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert faults < 3 * size * size * 2 // resource.getpagesize() // 4
