"""A backend that throws costs a sentence, not the process."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ktk
from ktk import _core

SIZES: dict[str, Any] = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
}
NAME = b"ktk.backend"


@pytest.fixture(scope="module")
def lying(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], _core.Backend]:
    """Make BF16's table with a function that throws: in packing what is not 0, or multiplying."""
    source, library = Path(__file__).with_name("thrower.cc"), tmp_path_factory.mktemp("t") / "t.so"
    compiler = os.environ.get("CXX", "g++").split()
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{ktk.get_include()}", "-o", os.fspath(library)]
    subprocess.run([*compiler, *flags, os.fspath(source)], check=True)
    make = ctypes.CDLL(os.fspath(library)).lying_table
    make.restype, make.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    honest = pointer(import_module("ktk._backends.bf16").__ktk_backend__(), NAME)
    return lambda packing: _core.Backend(capsule(make(honest, packing), NAME, None))


def layer(core: _core.Backend) -> ktk.MoE:
    backend = ktk.Backend(core, ktk.load_backend("BF16").info)
    return backend.moe(**SIZES, pool=ktk.WorkerPool(threads=2))


def expert(value: float = 0) -> dict[str, Any]:
    return dict.fromkeys(("gate", "up", "down"), np.full((32, 32), value, np.float32))


def test_in_packing(lying: Callable[[bool], _core.Backend]) -> None:
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        layer(lying(True)).load_expert(0, **expert(1))
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        _core.PackedMatrix(lying(True), "", expert(1)["gate"])


def test_an_expert_that_is_packed_in_part_is_not_there(
    lying: Callable[[bool], _core.Backend],
) -> None:
    moe = layer(lying(True))
    call = np.ones((2, 32), np.float32), np.zeros((2, 1), int), np.ones((2, 1), np.float32)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a backend threw a C"):
            moe.load_expert(0, **expert(1))
        assert (moe.loaded, moe.format) == ((), None)
        with pytest.raises(RuntimeError, match="no expert is loaded"):
            moe(*call)
    moe.load_expert(0, **expert())
    assert (moe(*call) == 0).all()
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        moe.load_expert(0, **expert() | {"down": expert(1)["down"]})
    with pytest.raises(RuntimeError, match="no expert is loaded"):
        moe(*call)
    moe.leave_out(0)
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        moe.load_expert(0, **expert(1))
    assert (moe(*call) == 0).all()  # still left out
    moe.load_expert(0, **expert())
    assert moe.loaded == (0,)


def test_in_a_call_and_in_a_ticket(lying: Callable[[bool], _core.Backend]) -> None:
    moe = layer(lying(False))
    moe.load_expert(0, **expert())
    hidden, ids, weights = (
        np.ones((2, 32), np.float32),
        np.zeros((2, 1), int),
        np.ones((2, 1), "f4"),
    )
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        moe(hidden, ids, weights)
    with pytest.raises(RuntimeError, match="a backend threw a C"):
        moe.submit(hidden, ids, weights).wait()
    # The call of a stream has nobody to raise to: its error is kept.
    errors, out = _core.Latch(), np.ones((2, 32), np.float32)
    call = _core.AsyncCall(
        moe._core, hidden, ids, weights.astype(np.float32), None, out, errors, name="layer 3"
    )
    call.start()
    call.wait()
    assert not out.any()
    with pytest.raises(RuntimeError, match="layer 3: a backend threw a C"):
        errors.check()
