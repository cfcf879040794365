"""Every damaged file is read as what it says, or refused with a sentence: never another exception.

The mutants are the same in every run. `KTK_MUTANTS` asks for more of them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import sound
import torch
from mutants import MUTATORS, mutants
from safetensors import SafetensorError, safe_open

import ktk
from ktk.checkpoint.entries import EntryError
from ktk.checkpoint.safetensors.tensor_file import TensorFile
from ktk.errors import CheckpointError

COUNT = int(os.environ.get("KTK_MUTANTS", "200"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", MUTATORS)
def test_a_mutant_is_read_or_refused_with_a_sentence(tmp_path: Path, kind: str) -> None:
    folder = sound.KINDS[kind](tmp_path / "model")
    mutate = mutants(folder, kind, seed=1)
    read = refused = 0
    for number in range(COUNT):
        how = mutate()
        started = time.process_time()
        try:
            sound.read(folder)
            ktk.Model.from_checkpoint(folder)
            read += 1
        except CheckpointError as error:
            message = str(error)
            assert "\n" not in message, how
            # An activation that ktk lacks is the model's, whatever file says so.
            assert str(folder) in message or "the activation" in message, f"{how}: {message}"
            refused += 1
        except Exception as error:
            raise AssertionError(f"mutant {number}: {how}: {error!r}") from error
        assert time.process_time() - started < 5, f"{number}: {how}"
    # Both happen, or the mutants are dull.
    assert read > COUNT // 50
    assert refused > COUNT // 4


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, NaN or not."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_headers_are_read_as_the_safetensors_package_reads_them(tmp_path: Path) -> None:
    """What it refuses is refused, and what it reads is the same."""
    folder = sound.fp8(tmp_path / "model")
    mutate = mutants(folder, "fp8", seed=2)
    path = folder / "model-1.safetensors"
    both = 0
    for number in range(2 * COUNT):
        how = mutate()
        try:
            ours = TensorFile(path)
        except EntryError:
            continue
        try:
            theirs = safe_open(path, framework="pt")
        except SafetensorError as error:
            # Element types of the future do not matter in tensors that nobody reads.
            assert "unknown variant" in str(error), how  # noqa: PT017 - it may also succeed
            continue
        with theirs:
            assert ours.metadata == (theirs.metadata() or {}), f"{number}: {how}"
            assert set(ours.tensors) == set(theirs.keys()), f"{number}: {how}"
            for name, info in ours.tensors.items():
                stored = theirs.get_slice(name)
                assert list(info.shape) == stored.get_shape(), f"{number}: {how}"
                assert info.dtype == stored.get_dtype(), f"{number}: {how}"
                mine, other = ours.read(name), theirs.get_tensor(name)
                assert mine.dtype == other.dtype
                assert torch.equal(bits(mine), bits(other)), f"{number}: {how}"
        both += how.startswith(path.name)
    assert both > COUNT // 50
