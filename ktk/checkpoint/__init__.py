"""Reads the routed experts of a model from the files its authors published.

`families` is the table of naming schemes; a new family is a row there. `config` reads sizes and
activation function from config.json, `index` finds and maps tensors, `experts` joins the three.
`gguf` does the same for GGUF files.
"""

from ktk.checkpoint.describe import Description, describe
from ktk.checkpoint.load import load_moe
from ktk.checkpoint.open import open_checkpoint

__all__ = ["Description", "describe", "load_moe", "open_checkpoint"]
