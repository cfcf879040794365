"""What ktk imports of vLLM, as far as tests of its layers need it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Method:
    """vLLM's classes of what a layer of experts does."""

    def __init__(self, moe: Any) -> None:
        self.moe = moe


STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"get_current_vllm_config_or_none": lambda: None},
    "vllm.distributed": {"get_world_group": None},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.fused_moe": {"FusedMoEMethodBase": Method},
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": {
        "UnquantizedFusedMoEMethod": Method
    },
    "vllm.model_executor.layers.linear": {
        "LinearMethodBase": object,
        "UnquantizedLinearMethod": object,
    },
}
OURS = ("ktk.vllm.experts", "ktk.vllm.linears", "ktk.vllm.place")


@contextmanager
def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import a module of ktk among them."""
    for path, contents in STAND_INS.items():
        module = ModuleType(path)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, path, module)
    for path in OURS:
        # What setitem puts back afterwards is removed first, so that nobody meets the stand-ins.
        monkeypatch.delitem(sys.modules, path, raising=False)
    yield importlib.import_module(name)
    for path in OURS:
        sys.modules.pop(path, None)


class Copied(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts elements as vLLM does where it loads a model anew."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.elements += args[0].numel()
        return func(*args, **(kwargs or {}))
