"""Reads the routed experts of a model from the files its authors published.

`families` is the table of naming schemes and `storage` the one of how a matrix is stored under any
of them; a new family or scheme is a row there. `config` reads sizes, activation function and
quantisation from config.json, `index` finds and maps tensors, `find` says what rows of the tables
a `layer` is of, `check` compares it with them, and `experts` reads it.
`gguf` does the same for GGUF files, and `open` chooses between the two. `default` chooses a backend
by what is stored, `load` makes layers, and `verify` reads everything to see that it is sound.
"""

from ktk.checkpoint.default import default_backend
from ktk.checkpoint.describe import Description, describe
from ktk.checkpoint.load import load_moe
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.verify import Fault, Verification, verify

__all__ = [
    "Description",
    "Fault",
    "Verification",
    "default_backend",
    "describe",
    "load_moe",
    "open_checkpoint",
    "verify",
]
