"""Reads the routed experts of a model: names, stored formats and sizes; no backend is known here.

`reader` says what all readers give: an open checkpoint has layers, and a layer has experts. There
is a folder for each kind of file: `safetensors`, as model authors publish them, `gguf`, and
`packed`, what `ktk convert` makes. `open` chooses between them by what `detect` finds. All share
`config` (what config.json says), `entries` (values of documents that somebody else wrote), `files`
(bytes of files), `matrix` and `pieces` (what is read). `describe` says what a checkpoint holds, and
`verify` reads everything to see that it is sound.
"""

from ktk.checkpoint.describe import Description, describe
from ktk.checkpoint.open import open_checkpoint
from ktk.checkpoint.verify import Fault, Verification, verify

__all__ = [
    "Description",
    "Fault",
    "Verification",
    "describe",
    "open_checkpoint",
    "verify",
]
