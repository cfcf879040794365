"""Brings mapped weights into memory before they are needed."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
import torch


def page_in(arrays: Iterable[Any]) -> None:
    """Read what tensors and arrays lie on, without the GIL.

    The kernel is told of all of it first, so that a disk has more than one request to work on;
    touching waits until it is there.
    """
    views = [_bytes(array) for array in arrays if isinstance(array, torch.Tensor | np.ndarray)]
    for view in views:
        start = view.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
        _madvise()(start, view.ctypes.data + view.nbytes - start, mmap.MADV_WILLNEED)
    for view in views:
        view[:: mmap.PAGESIZE].max(initial=0)


def _bytes(array: torch.Tensor | np.ndarray) -> np.ndarray:
    if isinstance(array, torch.Tensor):
        array = array.reshape(-1).view(torch.uint8).numpy()
    return array.reshape(-1).view(np.uint8)


@cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
