"""Packed files: the experts of a model as a backend stores them, made once and loaded often."""

from ktk.checkpoint.detect import is_packed
from ktk.packed.convert import Conversion, FilePlan, convert
from ktk.packed.read import PackedCheckpoint

__all__ = [
    "Conversion",
    "FilePlan",
    "PackedCheckpoint",
    "convert",
    "is_packed",
]
