"""Memory for what is read: lent again when nobody uses it, never before."""

from __future__ import annotations

import errno
import gc
import mmap
import resource
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from ktk.checkpoint.buffers import Buffers
from ktk.checkpoint.files import File

NBYTES = 3 << 20


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_lent_again() -> None:
    buffers = Buffers()
    array = buffers.take(NBYTES)
    assert array.dtype == np.uint8
    assert array.shape == (NBYTES,)
    assert array.flags.writeable
    first = address(array)
    del array
    assert address(buffers.take(NBYTES)) == first


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[16:32].reshape(4, 4)[1:],
        lambda array: array.view(np.float32)[::2],
        lambda array: torch.from_numpy(array).view(torch.bfloat16)[8:],
        lambda array: torch.from_numpy(array[64:]).numpy()[1:],
        lambda array: memoryview(array)[5:],
    ],
    ids=["rows", "floats", "torch", "there-and-back", "memoryview"],
)
def test_views_keep_memory(view: object) -> None:
    buffers = Buffers()
    array = buffers.take(NBYTES)
    first = address(array)
    kept = view(array)  # type: ignore[operator]
    del array
    gc.collect()
    other = buffers.take(NBYTES)
    assert address(other) != first
    del kept
    assert address(buffers.take(NBYTES)) == first


def test_sizes_are_apart() -> None:
    buffers = Buffers()
    assert [len(buffers.take(n)) for n in (0, 5, NBYTES, NBYTES + 1)] == [0, 5, NBYTES, NBYTES + 1]
    small = [buffers.take(1000) for _ in range(4)]
    assert len({address(one) for one in small}) == 4


def test_very_large_pieces_are_not_kept() -> None:
    buffers = Buffers()
    array = buffers.take(65 << 20)
    assert array.base is None  # its own memory, which ends with it
    assert buffers.take(64 << 20).base is not None


def test_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError):
        Buffers().take(1 << 62)

    def full(*_: int) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(MemoryError, match="there is no memory for 3145728 bytes"):
        Buffers().take(NBYTES)


def test_files_use_memory_again_until_they_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (NBYTES // 256 + 1))
    file = File(path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for begin in range(10):
        data = file.read(begin, NBYTES)
        assert data[0] == begin
        assert data[-1] == (begin + NBYTES - 1) % 256
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # The array before is there until the next one has come: two pieces of memory, not ten.
    assert faults < 3 * NBYTES // resource.getpagesize()
    piece = weakref.ref(data.base)
    file.close()
    assert piece() is not None
    assert data[3] == 12
    del data
    gc.collect()
    assert piece() is None
