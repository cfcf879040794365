"""The backends of the C files here, one object each: ``python -m ktk.testing mutants:NAME``.

Nothing is installed. The capsules are made with ctypes from the shared library that
KTK_MUTANTS names.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

CAPSULE_NAME = b"ktk.backend"
_library = ctypes.CDLL(os.environ["KTK_MUTANTS"])
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Mutant:
    """What an entry point of a backend names."""

    def __init__(self, symbol: str) -> None:
        self._table = ctypes.c_char.in_dll(_library, symbol)

    def __ktk_backend__(self) -> Any:
        return _new_capsule(ctypes.addressof(self._table), CAPSULE_NAME, None)


def __getattr__(name: str) -> Mutant:
    if name.startswith("_"):
        raise AttributeError(name)
    return Mutant(name)
