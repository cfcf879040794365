"""Saves a model with its packed experts, whoever packed them, and the tensors that a caller gives.

Transformers asks a model's quantizer for what `save_pretrained` writes, and forgets what the caller
gave as `state_dict`. A model may also have packed experts and no quantizer: packed at the first
call, as a part of a larger model, or beneath PEFT.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from ktk.transformers.packed import packed_modules
from ktk.transformers.quantizer import ExpertsQuantizer, attach


def install() -> None:
    """Surround `PreTrainedModel.save_pretrained`, once."""
    stock = PreTrainedModel.save_pretrained
    if not getattr(stock, "ktk", False):
        PreTrainedModel.save_pretrained = _with_experts(stock)  # type: ignore[method-assign]


def _with_experts(stock: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        quantizer = getattr(self, "hf_quantizer", None)
        if not isinstance(quantizer, ExpertsQuantizer) and packed_modules(self):
            attach(self)
            quantizer = self.hf_quantizer
        if not isinstance(quantizer, ExpertsQuantizer):
            return stock(self, *args, **kwargs)
        given = signature.bind_partial(self, *args, **kwargs).arguments
        quantizer.given = given.get("state_dict")
        try:
            return stock(self, *args, **kwargs)
        finally:
            quantizer.given = None

    save_pretrained.ktk = True  # type: ignore[attr-defined]
    return save_pretrained
