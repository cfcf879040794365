"""Reads the routed experts of a model from GGUF files.

`header` reads one file, `shards` joins the files of a split model, `blocks` knows ggml's types,
`architectures` turns metadata into sizes and an activation function, `layout` finds the tensors of
a layer, `experts` reads them.
"""

from ktk.checkpoint.gguf.blocks import Blocks
from ktk.checkpoint.gguf.layout import GgufLayer
from ktk.checkpoint.gguf.reader import GgufCheckpoint

__all__ = ["Blocks", "GgufCheckpoint", "GgufLayer"]
