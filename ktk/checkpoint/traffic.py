"""What a token reads of a checkpoint, as far as headers tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ktk.checkpoint.reader import CheckpointReader

# How names of the output head and of the embedding end, in safetensors and GGUF files.
_HEADS = ("lm_head.weight", "output.weight")
_EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "token_embd.weight")


class Experts(Protocol):
    """What is to be known of a layer: bytes of all its experts, how many there are, and top-k."""

    @property
    def nbytes(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def num_experts_per_tok(self) -> int: ...


def stored_bytes_per_token(
    checkpoint: CheckpointReader, layers: Sequence[Experts]
) -> dict[str, int]:
    """Return how many bytes of weights, as they are stored, one token reads, by part.

    Parameters
    ----------
    checkpoint
        The files.
    layers
        All layers with experts.

    Returns
    -------
    dict of str to int
        ``experts``: the k experts that a token is routed to, in all layers. ``head``: the output
        head, or the embedding that it is tied to. ``rest``: all other tensors but embeddings:
        attention, routers, shared experts, dense layers; an upper bound, because parts for images
        or for predicting several tokens are in it. Files that hold experts only have these only.
    """
    read = sum(one.nbytes * one.num_experts_per_tok // one.num_experts for one in layers)
    found = {"experts": read}
    sizes = checkpoint.tensor_sizes()
    if not sizes:
        return found
    # A name such as `attn_output.weight` is no head.
    parts = {name: name.rpartition(".weight")[0].rpartition(".")[2] + ".weight" for name in sizes}
    heads = [size for name, size in sizes.items() if parts[name] in _HEADS]
    embeddings = [size for name, size in sizes.items() if parts[name] in _EMBEDDINGS]
    found["head"] = sum(heads) or max(embeddings, default=0)
    others = sum(sizes.values()) - sum(one.nbytes for one in layers)
    found["rest"] = others - sum(heads) - sum(embeddings)
    return found
