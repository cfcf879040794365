"""Reads what is no expert from a GGUF file, as transformers would but for what stays in blocks.

Its own reader decodes every tensor of the file to f32, experts too, and wants one file.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import torch

from ktk.checkpoint.gguf.blocks import as_blocks, format_of, row_nbytes
from ktk.checkpoint.gguf.reader import GgufCheckpoint
from ktk.checkpoint.gguf.shards import TensorSet
from ktk.dtypes import FLOAT_DTYPES
from ktk.errors import CheckpointError
from ktk.expert import Matrix
from ktk.quantize import dequantize
from ktk.transformers.blocks import load_blocks, plan_blocks
from ktk.transformers.config import KtkConfig

# Bytes that are decoded at once.
_CHUNK = 1 << 22
# What transformers does not find in files by itself, and would fill with random numbers.
_UNMAPPED = ((re.compile(r"blk\.(\d+)\.attn_sinks\.weight"), "model.layers.{}.self_attn.sinks"),)
# Tensors that no architecture rearranges, and that are too large to be f32 as a whole.
_PLAIN = ("token_embd.weight", "output.weight")


def read_others(
    checkpoint: GgufCheckpoint,
    model: Any,
    dtype: torch.dtype,
    config: KtkConfig,
    *,
    in_blocks: bool = True,
) -> dict[str, Any]:
    """Return the tensors of a model by the names that they have in it.

    Dense layers that `config` or their blocks give to ktk are packed, and put into the model.

    Parameters
    ----------
    checkpoint
        The files.
    model
        Of transformers, without the weights of its experts; tensors that it has not are not read.
    dtype
        Of the tensors.
    config
        Names the backends of dense layers.
    in_blocks
        Whether dense layers of which `config` says nothing are packed as they are; else they are
        decoded, as for a GPU.

    Raises
    ------
    CheckpointError
        A tensor of the model is not among those of the files.
    """
    # Of versions that read all architectures tensor by tensor, this is gone, and not called for.
    from transformers import modeling_gguf_pytorch_utils as stock

    architecture = checkpoint.tensors.fields["general.architecture"]
    kind: Any = stock.TENSOR_PROCESSORS.get(architecture, stock.TensorProcessor)
    processor = kind(config=model.config.get_text_config(decoder=True).to_dict())
    names = stock.get_gguf_hf_weights_map(model, processor)
    wanted = set(model.state_dict()) - set(model.all_tied_weights_keys)
    for name in checkpoint.tensors.names():
        for pattern, target in _UNMAPPED:
            if (match := pattern.fullmatch(name)) and (
                known := target.format(*match.groups())
            ) in wanted:
                names[name] = known
    kept = plan_blocks(checkpoint.tensors, model, names, processor, config, in_blocks)
    found: dict[str, Any] = {}
    for name in checkpoint.tensors.names():
        if name not in names or name in kept:
            continue
        checkpoint.tensors.check(name)
        if name in _PLAIN:
            found[names[name]] = _decoded(checkpoint.tensors, name, dtype)
            continue
        values = _decoded(checkpoint.tensors, name, torch.float32).numpy()
        result = processor.process(
            values, name, tensor_key_mapping=names, parsed_parameters={"tensors": found}
        )
        if result.name in names:
            tensor = torch.from_numpy(np.ascontiguousarray(result.weights))
            found[names[result.name]] = tensor.to(dtype)
    for one in kept.values():
        load_blocks(checkpoint.tensors, model, one, found.get(f"{one.module}.bias"))
    checkpoint.close()
    wanted -= {f"{one.module}.weight" for one in kept.values()}
    if missing := sorted(wanted - set(found)):
        raise CheckpointError(
            f"{checkpoint.path} lacks {missing[0]}"
            + (f" and {len(missing) - 1} more tensors" if missing[1:] else "")
            + ", or transformers does not know what GGUF files call it: load the model's "
            "safetensors files instead"
        )
    return found


def _decoded(tensors: TensorSet, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read and decode a tensor, some rows at a time."""
    info = tensors.info(name)
    fmt, rows = format_of(info), math.prod(info.shape[:-1])
    out = torch.empty(rows, info.shape[-1], dtype=dtype, device="cpu")
    step = max(_CHUNK // row_nbytes(info), 1)
    for begin in range(0, rows, step):
        stored = tensors.rows(name, begin, min(step, rows - begin))
        data = torch.from_numpy(as_blocks(info, stored))
        if fmt.element in FLOAT_DTYPES:
            out[begin : begin + step] = data.view(FLOAT_DTYPES[fmt.element])
        else:
            out[begin : begin + step] = dequantize(Matrix(fmt, data))
    return out.view(info.shape)
