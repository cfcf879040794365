"""Experts whose bytes are still in files, however few, read the way the core does."""

from __future__ import annotations

import os
from unittest import mock

import numpy as np
import torch

from ktk.checkpoint import files
from ktk.checkpoint.buffers import Buffers
from ktk.checkpoint.pieces import flat
from ktk.checkpoint.reader import LayerReader
from ktk.expert import Expert
from ktk.unread import UnreadExpert

_take = Buffers.take


def _not_numbers(self: Buffers, nbytes: int) -> np.ndarray:
    """Lend memory in which every float is NaN: who looks at what is not read, finds that."""
    array = _take(self, nbytes)
    array[:] = 0xFF
    return array


def unread(layer: LayerReader, number: int) -> Expert:
    """Return an expert of which all is unread that may be."""
    least = mock.patch.object(files, "LEAST_KEPT", 1)
    with least, mock.patch.object(Buffers, "take", _not_numbers):
        return layer.unread(number)


def fill(expert: Expert) -> int:
    """Read what is unread where it belongs; returns how many bytes those are."""
    if not isinstance(expert, UnreadExpert):
        return 0
    with expert.unread.reading() as reads:
        for file, begin, memory, *_ in reads:
            assert os.preadv(file, [memory.data], begin) == memory.size
    return sum(memory.size for _, _, memory, *_ in reads)


def assert_same(layer: LayerReader, number: int) -> int:
    """Whatever is read later, an expert is the same; returns how many bytes of it that were."""
    expected, got = layer.expert(number), unread(layer, number)
    count = fill(got)
    assert got.arrays().keys() == expected.arrays().keys()
    for name, array in expected.arrays().items():
        other = got.arrays()[name]
        assert isinstance(array, torch.Tensor)
        assert (other.dtype, other.shape) == (array.dtype, array.shape), name
        assert np.array_equal(flat(other), flat(array)), name
    return count
