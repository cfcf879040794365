"""Makes packed files (`ktk.checkpoint.packed`) of any checkpoint: `ktk convert`.

`convert` writes the layers of a folder, `encode` makes what a backend stores of an expert, `resume`
decides what an earlier run left that can stay, and `source` tells by `fingerprint` and `stamps`
whether the source is what it was. `compressed` writes checkpoints for others, too.
"""

from ktk.conversion.convert import Conversion, FilePlan, convert

__all__ = ["Conversion", "FilePlan", "convert"]
