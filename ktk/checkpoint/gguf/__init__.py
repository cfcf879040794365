"""Reads the routed experts of a model from GGUF files.

`header` reads one file, `shards` joins the files of a split model, `blocks` knows ggml's types,
`architectures` turns metadata into sizes and an activation function, `layout` finds the tensors of
a layer, `layer` reads its experts, and `reader` opens the model.
"""

from ktk.checkpoint.gguf.reader import GgufCheckpoint

__all__ = ["GgufCheckpoint"]
