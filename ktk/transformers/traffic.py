"""Bytes of weights that a token reads, by parts of a model."""

from __future__ import annotations

from typing import Any

from torch import nn

from ktk.transformers.dense import KtkEmbedding, KtkLinear
from ktk.transformers.layout import is_experts
from ktk.transformers.modules import top_k_of
from ktk.transformers.packed import Packed, packed_of

#: The part of a model that is in the memory of a GPU.
ON_GPU = "gpu"


def bytes_per_token(model: Any) -> dict[str, int]:
    """Return how many bytes of weights one token reads, in a call with this token alone.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, whether ktk computes any of it or not.

    Returns
    -------
    dict of str to int
        ``experts``: of each layer the k experts of a token, on average over its experts.
        ``linears``: all dense layers but the head, with attention, shared experts and what of the
        routers is a dense layer. ``head``: the output head. ``other``: all other parameters, such
        as norms and biases, and one row of each embedding. ``gpu``: what of all these is in the
        memory of a GPU, and counts nowhere else. Packed weights count as packed; activations and
        the cache of keys and values do not count.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    found = {"experts": 0, "linears": 0, "head": 0, "other": 0, ON_GPU: 0}

    def add(part: str, nbytes: int) -> None:
        found[ON_GPU if on_gpu else part] += nbytes

    for module in model.modules():
        tensors = {name: one.nbytes for name, one in module._parameters.items() if one is not None}
        packed = packed_of(module)
        ktks = isinstance(packed, Packed) or isinstance(module, KtkLinear | KtkEmbedding)
        on_gpu = not ktks and any(
            one.is_cuda for one in module._parameters.values() if one is not None
        )
        if is_experts(module):
            k, count = top_k_of(module), module.num_experts
            nbytes = sum(tensors.values())
            if isinstance(packed, Packed):
                nbytes += packed.moe.nbytes
            add("experts", nbytes * k // count)
        elif isinstance(module, nn.Linear):
            part = "head" if module is head else "linears"
            nbytes = tensors.pop("weight", 0)
            if isinstance(module, KtkLinear):
                nbytes = module.layer.linear.nbytes
            add(part, nbytes)
            add("other", sum(tensors.values()))
        elif isinstance(module, KtkEmbedding):
            add("other", module.layer.linear.nbytes // module.num_embeddings)
        elif isinstance(module, nn.Embedding):
            add("other", module.weight.nbytes // module.num_embeddings)
        else:
            add("other", sum(tensors.values()))
    return found
