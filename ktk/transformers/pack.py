"""Packs the experts of a model that is in memory."""

from __future__ import annotations

from typing import Any

from ktk.backend import Backend
from ktk.registry import load_backend
from ktk.transformers.modules import experts_of
from ktk.transformers.packed import packed_modules
from ktk.transformers.packing import DEFAULT_BACKEND, pack_module
from ktk.transformers.quantizer import attach


def pack(model: Any, backend: str | Backend = DEFAULT_BACKEND) -> Any:
    """Pack the experts of a model that exists, layer by layer, and free their tensors.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, on any device.
    backend : str or Backend
        What computes the experts; BF16 keeps each bit of bf16 weights.

    Returns
    -------
    PreTrainedModel
        `model`.

    Raises
    ------
    ValueError
        The model has no experts that ktk can compute, or they are packed already.
    BackendError
        The backend cannot be used here.
    """
    backend = load_backend(backend) if isinstance(backend, str) else backend
    found = experts_of(model)
    if not found:
        earlier = packed_modules(model)
        raise ValueError(
            f"the experts of {type(model).__name__} are packed already, for "
            f"{next(iter(earlier.values())).moe.backend.name}: load the model again"
            if earlier
            else f"{type(model).__name__} has no experts that ktk can compute"
        )
    for one in found:
        pack_module(one, backend)
    attach(model)
    return model
