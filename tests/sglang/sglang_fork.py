"""A model of sglang-kt: its own wrapper of experts, ktk on the CPU, stand-ins for the GPU."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import sglang_checkpoints as checkpoints
import sglang_gpu as gpu
import torch
from sglang_checkpoints import INNER, LAYERS, TOP, E, H
from sglang_stage import stage

from ktk import KTMoEWrapper
from ktk.ktmoe import wrapper as own_wrapper

NAME = "sglang.srt.layers.moe.kt_ep_wrapper"


@dataclass
class RunnerConfig:
    """What of MoeRunnerConfig the wrapper reads."""

    num_experts: int = E
    num_local_experts: int = E
    activation: str = "silu"
    routed_scaling_factor: float | None = 2.5
    gemm1_alpha: float | None = None
    gemm1_clamp_limit: float | None = None
    swiglu_limit: float | None = None


class Base:
    """FusedMoEMethodBase."""


class Recorder:
    """Of the distribution of experts."""

    def on_gpu_expert_mask(self, layer: int, mask: torch.Tensor) -> None:
        assert mask.shape == (E,)


def _identity_repack(
    codes: torch.Tensor, perm: torch.Tensor, k: int, n: int, bits: int
) -> torch.Tensor:
    assert codes.shape == (k // 8, n)
    assert (perm.numel(), bits) == (0, 4)
    return codes.clone()


def _numa(name: str) -> Any:
    assert name == "libnuma.so.1"
    return SimpleNamespace(numa_available=lambda: 0, numa_set_localalloc=lambda: None)


def standins(arguments: Any) -> dict[str, dict[str, Any]]:
    """Return the modules that the wrapper imports, as it uses them."""
    return {
        "sglang.srt.configs.glm5_next": {"GLM5_NEXT_SUPPORTED_TP_SIZES": (1, 2, 4, 8)},
        "sglang.srt.distributed": {
            "get_tensor_model_parallel_rank": lambda: 0,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "get_tp_group": lambda: None,
        },
        "sglang.srt.layers.quantization.base_config": {"FusedMoEMethodBase": Base},
        "sglang.srt.layers.quantization.marlin_utils": {
            "marlin_permute_scales": lambda scale, k, n, group: scale.clone(),
        },
        "sglang.srt.utils": {"get_compiler_backend": lambda: "eager", "is_cuda": lambda: True},
        "sglang.jit_kernel.gptq_marlin_repack": {"gptq_marlin_repack": _identity_repack},
        "sglang.srt.layers.moe.utils": {"is_kt_ep_wrapper_disabled": lambda: False},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": gpu.Combine},
        "sglang.srt.layers.moe.fused_moe_triton.layer": {"UnquantizedFusedMoEMethod": gpu.Method},
        "sglang.srt.layers.quantization.fp8": {"Fp8MoEMethod": gpu.Fp8MoEMethod},
        "sglang.srt.layers.quantization.mxfp4_deepseek": {
            "DeepSeekMxfp4MoEMethod": gpu.DeepSeekMxfp4MoEMethod
        },
        "sglang.srt.server_args": {"get_global_server_args": lambda: arguments},
        "sglang.srt.eplb.expert_distribution": {
            "get_global_expert_distribution_recorder": Recorder
        },
        "sglang.srt.eplb.expert_location_dispatch": {
            "get_global_expert_location_metadata": lambda: None
        },
        "sglang.srt.environ": {
            "envs": SimpleNamespace(SGLANG_DSV4_2604_SUBMODE=SimpleNamespace(get=lambda: None))
        },
    }


def arguments(path: Path, method: str, **more: Any) -> Any:
    """Return what of ServerArgs the wrapper reads, with the engine's defaults."""
    config = SimpleNamespace(**checkpoints.config())
    return SimpleNamespace(
        **{
            "kt_weight_path": str(path),
            "kt_method": method,
            "kt_cpuinfer": 2,
            "kt_threadpool_count": 1,
            "kt_numa_nodes": None,
            "kt_num_gpu_experts": 3,
            "kt_gpu_experts_ratio": None,
            "kt_expert_placement_strategy": "random",
            "init_expert_location": "trivial",
            "kt_max_deferred_experts_per_token": None,
            "kt_gpu_prefill_token_threshold": None,
            "kt_enable_dynamic_expert_update": False,
            "kt_expert_lora_path": None,
            "chunked_prefill_size": 64,
            "get_hf_config": lambda: config,
            **more,
        }
    )


class Called(torch.nn.Module):
    """A layer of experts whose method, which wraps the GPU's, is called as the engine calls it."""

    quant_method: Any

    def forward(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        given = gpu.Dispatch(hidden, gpu.TopK(weights, ids))
        return cast(torch.Tensor, self.quant_method.apply(self, given).hidden_states)

    @property
    def cpu(self) -> KTMoEWrapper:  # type: ignore[override] # the name that the client uses
        return cast(KTMoEWrapper, self.quant_method.wrapper)


class Layer(Called):
    """What of FusedMoE the wrapper uses: the engine makes it, and its method, in this order."""

    def __init__(
        self, client: ModuleType, given: Any, number: int, kind: str, runner: RunnerConfig
    ) -> None:
        super().__init__()
        self.layer_id, self.top_k, self.num_experts = number, TOP, E
        self.intermediate_size_per_partition, self.moe_tp_size = INNER, 1
        self.moe_runner_config = runner
        self.use_triton_kernels = False
        own = gpu.METHODS.get(kind, gpu.Method)
        self.quant_config = SimpleNamespace(get_quant_method=lambda layer, prefix: own())
        registry = client.__dict__["register_moe_quant_wrapper"].__globals__
        # The engine's own registry wraps the GPU's method.
        self.quant_method = registry["maybe_wrap_moe_quant_method"](self, own(), given)
        assert registry["is_wrapped_method"](self.quant_method, "kt_ep")
        self.quant_method.create_weights(self, E, H, INNER, torch.bfloat16)
        self.quant_method.create_moe_runner(self, runner)
        for expert, parts in enumerate(checkpoints.sources(kind, number)):
            slot = int(self.quant_method.logical_to_gpu_index[expert])
            if slot >= 0:
                self.quant_method.gpu_method.load(self, slot, parts)
        self.quant_method.process_weights_after_loading(self)

    @property
    def gpu_slots(self) -> list[int]:
        """The expert of each slot of the GPU."""
        return cast(list[int], self.quant_method.gpu_index_to_logical.tolist())


def client(patch: pytest.MonkeyPatch, files: Path, given: Any) -> ModuleType:
    """Load the wrapper of sglang-kt, which finds ktk as kt_kernel."""
    registry = "sglang.srt.layers.moe.quant_method_registry"
    module = stage(patch, files, standins(given), registry, NAME)
    assert module.KTRANSFORMERS_AVAILABLE
    assert module.KTMoEWrapper is own_wrapper.KTMoEWrapper
    # The last CPU, which the client binds its thread to, is one that this process may use.
    patch.setattr(os, "cpu_count", lambda: max(os.sched_getaffinity(0)) + 1)
    numa = SimpleNamespace(CDLL=_numa, addressof=ctypes.addressof, c_char=ctypes.c_char)
    patch.setattr(module, "ctypes", numa)
    return module


def model(
    patch: pytest.MonkeyPatch,
    files: Path,
    path: Path,
    method: str,
    kind: str,
    runner: RunnerConfig | None = None,
    **more: Any,
) -> list[Layer]:
    """Make the layers of a model, as the engine does when it starts."""
    given = arguments(path, method, **more)
    module = client(patch, files, given)
    runner = runner or RunnerConfig()
    return [Layer(module, given, number, kind, runner) for number in range(LAYERS)]
