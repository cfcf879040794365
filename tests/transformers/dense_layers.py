"""What tests of packed dense layers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tiny
import torch
from tiny import FAMILIES, Family

import ktk
import ktk.transformers
from ktk.testing import bounds, elements, formats, reference
from ktk.transformers.dense import KtkLinear, packed_linears

F32 = elements.ELEMENTS["f32"]


def tied(name: str) -> Family:
    family = FAMILIES[name]
    return Family(family.made_by, {**family.extra, "tie_word_embeddings": True})


def dense(model: Any, backend: str = "BF16") -> Any:
    return ktk.transformers.pack(model, linears=backend, head=backend)


@contextmanager
def recorded(model: Any) -> Iterator[list[tuple[Any, torch.Tensor, torch.Tensor]]]:
    """Keep what packed dense layers are called with, and what they return."""
    calls: list[tuple[Any, torch.Tensor, torch.Tensor]] = []

    def after(module: Any, args: Any, out: torch.Tensor) -> None:
        calls.append((module, args[0].flatten(0, -2).clone(), out.flatten(0, -2).clone()))

    hooks = [
        one.register_forward_hook(after) for one in model.modules() if isinstance(one, KtkLinear)
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def check_linears(model: Any, ids: torch.Tensor) -> None:
    """Each packed layer is within its derived bound of float64 with the weight that is stored."""
    with recorded(model) as calls:
        tiny.logits(model, ids)
    assert {call[0].layer.name for call in calls} == set(packed_linears(model))
    for module, x, out in calls:
        linear = module.layer.linear
        [variant] = [one for one in linear.backend.variants if one.name == linear.variant]
        exact, weight = x.double().numpy(), linear.unpack().astype(np.float64)
        fmt = linear.formats[0]
        depth = formats.fill_bytes(fmt, 1) if formats.is_known(fmt) else variant.k_step
        act = variant.act_of(fmt, variant.n_step, depth)
        stored = reference.encode(reference.Uncertain(exact, np.zeros_like(exact)), act)
        bias = None if module.bias is None else module.bias.detach().double().numpy()
        y = reference.biased(reference.matmul(stored, weight), bias)
        assert isinstance(F32, elements.Float)
        y = y.widened(F32.rounding(y.size, up_to=True))
        bounds.check(out.double().numpy(), y.value, y.error, module.layer.name)
