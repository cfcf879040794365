"""SGLang's own methods and layers on CPUs, unchanged, with nothing else of SGLang behind them.

Whatever they import and this file does not name is a stand-in that says no to every question. There
are no kernels, so that what ktk does not compute fails.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang_gpu as gpu
import torch
from sglang_stage import load, stage

QUANTIZATION = "sglang.srt.layers.quantization"
LAYER = "sglang.srt.layers.moe.fused_moe_triton.layer"
KERNELS = "sglang.kernels.ops.moe.ep_moe_kernels"
#: What SGLang says of a checkpoint in FP8 by blocks.
FP8 = {
    "is_checkpoint_fp8_serialized": True,
    "weight_block_size": [128, 128],
    "use_mxfp8": False,
    "convert_mxfp8_to_block_fp8": None,
    "is_fp4_experts": False,
    "dequant_fp4_to_fp8": False,
    "activation_scheme": "dynamic",
}
#: Packages of GPUs that are imported by these files.
ABSENT = ("sgl_kernel", "flashinfer", "triton")


class Nothing:
    """Whatever is asked of it: no. As a decorator, it leaves functions alone."""

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __bool__(self) -> bool:
        return False


NOTHING = Nothing()


class _Class(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return NOTHING


class _Module(ModuleType):
    """A module with whatever is asked of it: classes without members, and functions that say no."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Class(name, (), {}) if name.lstrip("_")[:1].isupper() else NOTHING
        setattr(self, name, made)
        return made


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for every module of SGLang, and of packages for GPUs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] not in ("sglang", *ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class Base:
    """Bases of methods."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


def _set_attributes(param: Any, attributes: dict[str, Any]) -> None:
    for name, value in (attributes or {}).items():
        setattr(param, name, value)


def no(*_: Any, **__: Any) -> bool:
    return False


def standins() -> dict[str, dict[str, Any]]:
    """Return what is more than no: that this is a CPU, without SGLang's kernels."""
    return {
        "sglang.srt.utils": {
            **dict.fromkeys(("cpu_has_amx_support", "is_cuda", "is_hip", "is_npu", "is_xpu"), no),
            "is_cpu": lambda: True,
            "set_weight_attrs": _set_attributes,
            "use_intel_amx_backend": no,
            "get_bool_env_var": no,
        },
        f"{QUANTIZATION}.base_config": {
            "FusedMoEMethodBase": Base,
            "LinearMethodBase": Base,
            "QuantizationConfig": Base,
            "QuantizeMethodBase": Base,
        },
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_rank=0),
            "get_server_args": lambda: SimpleNamespace(tp_size=1, nnodes=1),
        },
        "sglang.kernels.fused_op": {"BaseFusedOp": type("BaseFusedOp", (), {})},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": gpu.Combine},
        # A kernel of Triton, for GPUs. Hooks need a function of its own here.
        KERNELS: {"zero_experts_compute_triton": lambda *_: NOTHING},
        "sglang.srt.layers.moe.topk": {"StandardTopKOutput": lambda *three: gpu.TopK(*three[:2])},
        "sglang.srt.eplb.expert_location": {
            "get_global_expert_location_metadata": lambda: None,
        },
    }


@dataclass
class Runner:
    """MoeRunnerConfig, as far as ktk reads it."""

    activation: str = "silu"
    is_gated: bool = True
    apply_router_weight_on_input: bool = False
    no_combine: bool = False
    gemm1_alpha: float | None = None
    gemm1_beta: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


@dataclass
class Engine:
    """The loaded files, with ktk's hooks around their methods."""

    unquant: ModuleType
    fp8: ModuleType
    int8: ModuleType
    layer: ModuleType
    registry: Any
    applied: Sequence[str] = field(default_factory=list)


def engine(patch: pytest.MonkeyPatch, files: Path) -> Engine:
    """Load SGLang's files, and have ktk register its hooks with SGLang's own registry."""
    finder = Absent()
    patch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for name in [*sys.modules]:
        if name.partition(".")[0] in ABSENT:
            patch.delitem(sys.modules, name)
    names = ("unquant", "fp8", "w8a8_int8")
    stage(patch, files, standins(), *(f"{QUANTIZATION}.{name}" for name in names), kind=_Module)
    layer = load(patch, files, LAYER)
    hooks = load(patch, files, "sglang.srt.plugins.hook_registry")
    loaded = [sys.modules[f"{QUANTIZATION}.{name}"] for name in names]
    return Engine(loaded[0], loaded[1], loaded[2], layer, hooks.HookRegistry)


def experts(made: Engine, method: Any, config: dict[str, Any], **options: Any) -> Any:
    """Make a layer of experts, as SGLang's own class does, of which the loader is used."""
    layer = made.layer.FusedMoE.__new__(made.layer.FusedMoE)
    torch.nn.Module.__init__(layer)
    count, ranks = config["num_experts"], options.pop("ranks", 1)
    values: dict[str, Any] = {
        "layer_name": "model.layers.1.mlp.experts",
        "layer_id": 1,
        "top_k": config["num_experts_per_tok"],
        "num_experts": count,
        "num_local_experts": count,
        "moe_ep_size": 1,
        "moe_ep_rank": 0,
        "moe_tp_size": ranks,
        "moe_tp_rank": 0,
        "use_presharded_weights": False,
        "uses_expert_location": False,
        "quant_config": None,
        "quant_method": method,
        "scheme": None,
        "num_fused_shared_experts": 0,
        "_has_fused_shared": False,
        "_num_global_routed": count,
        "_num_local_routed": count,
        "_expert_storage_rank": 0,
        "moe_runner_config": Runner(),
        **options,
    }
    for name, value in values.items():
        object.__setattr__(layer, name, value)
    method.create_weights(
        layer=layer,
        num_experts=values["num_local_experts"],
        hidden_size=config["hidden_size"],
        intermediate_size_per_partition=config["moe_intermediate_size"] // ranks,
        params_dtype=torch.bfloat16,
        weight_loader=layer.weight_loader,
        with_bias=False,
    )
    return layer


def of_quantization(**values: Any) -> Any:
    """Return a quant_config of SGLang's."""
    return SimpleNamespace(**values)
