"""Experts of transformers' models on ktk's kernels; docs/transformers.md tells users.

::

    import ktk.transformers
    model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="ktk")

For commands: :func:`load` and :func:`load_tokenizer` take what a user calls a model (a folder, a
GGUF file, a folder that `ktk convert` wrote, a name of the hub), and return objects of transformers
that are ready for `generate`. Both raise `ktk.CheckpointError`, `ktk.BackendError`, `OSError` or
`ValueError` with one sentence; importing this package without transformers raises an `ImportError`
with the install line. What was packed, and for which backend, ``packed_modules(model)`` of
`ktk.transformers.packed` tells: a dict of names to objects whose ``moe`` is the `ktk.MoE`. Warnings
go to the logger "ktk.transformers", a bar of loading to stderr if that is a terminal.

`hook` and `config` are how transformers gets here. `quantizer` takes experts out of a model that is
loaded and puts them back packed: `files` from the checkpoint, `gguf` for the rest of a GGUF file,
`packing` from tensors; `saving` has it asked for what is saved. `modules` finds experts, `layout`
and `activation` say what they are, `packed` is what is left in their place, and `forward` calls it.
`linears` finds dense layers and packs them, `blocks` keeps those of GGUF files, `codes` those of
other checkpoints, and `dense` has the modules that stand for them. `attention` has torch compute
heads that share keys together.
"""

try:
    import transformers as _transformers  # noqa: F401
except ImportError as error:
    raise ImportError('ktk.transformers needs transformers: pip install "ktk[run]"') from error

from ktk.transformers import attention as _attention
from ktk.transformers import forward as _forward  # noqa: F401
from ktk.transformers.config import KtkConfig
from ktk.transformers.hook import install
from ktk.transformers.load import load, load_tokenizer
from ktk.transformers.pack import pack
from ktk.transformers.saving import install as _install_saving
from ktk.transformers.traffic import bytes_per_token

__all__ = ["KtkConfig", "bytes_per_token", "load", "load_tokenizer", "pack"]

install()
_install_saving()
_attention.install()
