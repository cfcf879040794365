"""Dense layers of vLLM, as far as they need none: stand-ins take the place of what is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from ktk.expert import Matrix
from ktk.quantize import dequantize, quantize

STAND_INS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {"get_current_vllm_config_or_none": None},
    "vllm.distributed": {"get_world_group": None},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.linear": {
        "LinearMethodBase": object,
        "UnquantizedLinearMethod": object,
    },
}
OURS = ("ktk.vllm.linears", "ktk.vllm.place")


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for name, contents in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for name in OURS:
        # What setitem puts back afterwards is removed first, so that nobody meets the stand-ins.
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module("ktk.vllm.linears")
    for name in OURS:
        sys.modules.pop(name, None)


def test_a_decoded_matrix_has_its_factor_once(linears: ModuleType) -> None:
    weight = quantize(torch.randn(8, 64) * 0.01, "e2m1-e4m3-g16", factor=0.001)
    matrix = Matrix(weight.format, weight.data, weight.scale, factor=weight.factor)
    decoded = linears._decoded(matrix)
    assert decoded.factor is None
    assert torch.equal(decoded.data, dequantize(matrix).bfloat16())
