"""Reads the routed experts of a model from safetensors files, as its authors published them.

`families` is the table of naming schemes and `storage` the one of how a matrix is stored under any
of them; a new family or scheme is a row there. `tensor_file` reads one file, `index` knows which
file holds which tensor, `find` says what rows of the tables a layer is of, `names` what its tensors
are called, and `check` compares them with the tables. `layer` reads the experts of a layer, and
`reader` opens the folder. `single` finds any one matrix in codes by its name.
"""

from ktk.checkpoint.safetensors.reader import SafetensorsCheckpoint

__all__ = ["SafetensorsCheckpoint"]
