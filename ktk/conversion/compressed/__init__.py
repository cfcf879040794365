"""Makes checkpoints in the formats of compressed-tensors: `ktk convert --to`.

`formats` makes the tensors of a matrix, `plan` says which tensor goes into which file, `shard`
writes a file, `config` says in config.json what was done, `others` finds what else a folder holds,
`state` what an earlier run began, and `convert` does it all.
"""

from ktk.conversion.compressed.convert import CheckpointConversion, convert_checkpoint
from ktk.conversion.compressed.formats import TARGETS

__all__ = ["TARGETS", "CheckpointConversion", "convert_checkpoint"]
