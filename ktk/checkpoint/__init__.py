"""Reads the routed experts of a model from the files its authors published.

`families` is the table of naming schemes; a new family is a row there. `config` reads sizes and
activation function from config.json, `index` finds and maps tensors, `experts` joins the three.
"""

from ktk.checkpoint.describe import Description, describe
from ktk.checkpoint.load import load_moe

__all__ = ["Description", "describe", "load_moe"]
