"""Packed files: the experts of a model as a backend stores them, made once and loaded often.

`layout` says which tensors a file has, `header` what it says about itself, `folder` what a folder
of such files is. `reader` reads them, `write` writes them; `ktk.conversion` makes
them of other checkpoints.
"""

from ktk.checkpoint.packed.reader import PackedCheckpoint

__all__ = ["PackedCheckpoint"]
