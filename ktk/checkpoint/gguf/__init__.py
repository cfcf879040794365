"""Reads the routed experts of a model from GGUF files.

`header` reads one file, `shards` joins the files of a split model, `blocks` knows ggml's types,
`architectures` turns metadata into sizes and an activation function, `experts` finds the tensors.
"""

from ktk.checkpoint.gguf.blocks import Blocks
from ktk.checkpoint.gguf.experts import GgufCheckpoint, GgufLayer

__all__ = ["Blocks", "GgufCheckpoint", "GgufLayer"]
