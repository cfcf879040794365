"""Packs the experts and dense layers of a model that is in memory."""

from __future__ import annotations

import copy
from typing import Any

from transformers import PreTrainedConfig

from ktk.backend import Backend
from ktk.registry import load_backend
from ktk.transformers.linears import pack_linears
from ktk.transformers.modules import experts_of
from ktk.transformers.packed import packed_modules
from ktk.transformers.packing import DEFAULT_BACKEND, pack_module
from ktk.transformers.quantizer import attach
from ktk.transformers.ties import share, tied_experts


def pack(
    model: Any,
    backend: str | Backend = DEFAULT_BACKEND,
    *,
    linears: str | Backend | None = None,
    head: str | Backend | None = None,
) -> Any:
    """Pack the experts of a model that exists, layer by layer, and free their tensors.

    Parameters
    ----------
    model : PreTrainedModel
        Of transformers, on any device.
    backend : str or Backend
        What computes the experts; BF16 keeps each bit of bf16 weights.
    linears : str or Backend, optional
        What computes dense layers: attention, dense MLPs and shared experts, but no routers and
        nothing narrower than 64. By default they stay as they are.
    head : str or Backend, optional
        What computes the output head. An embedding that is tied to it becomes rows of what is
        packed, and its tensor goes, too. By default both stay as they are.

    Returns
    -------
    PreTrainedModel
        `model`.

    Raises
    ------
    ValueError
        The model has no experts that ktk can compute, or they are packed already; of no importance
        where dense layers or the head are to be packed.
    BackendError
        The backend cannot be used here.
    """
    backend = load_backend(backend) if isinstance(backend, str) else backend
    found, tied = experts_of(model), tied_experts(model)
    if not found and linears is None and head is None:
        earlier = packed_modules(model)
        raise ValueError(
            f"the experts of {type(model).__name__} are packed already, for "
            f"{next(iter(earlier.values())).moe.backend.name}: load the model again"
            if earlier
            else f"{type(model).__name__} has no experts that ktk can compute"
        )
    _own_configs(model)
    for one in found:
        pack_module(one, backend)
    share(model, tied)
    pack_linears(model, linears, head)
    attach(model)
    return model


def _own_configs(model: Any) -> None:
    """Let a model have its configuration for itself: which experts it calls stands there."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PreTrainedConfig):
            module.config = copy.deepcopy(config, copies)
