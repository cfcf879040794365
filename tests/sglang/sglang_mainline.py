"""A model of mainline SGLang: its own wrapper of experts, ktk on the CPU, stand-ins for the GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import sglang_checkpoints as checkpoints
import sglang_gpu as gpu
import torch
from sglang_checkpoints import INNER, LAYERS, TOP, E, H
from sglang_cuda import Cuda
from sglang_fork import Base, Called, RunnerConfig
from sglang_stage import stage

from ktk import KTMoEWrapper

NAME = "sglang.srt.layers.moe.kt_ep_wrapper"


def standins(path: Path, method: str, **more: Any) -> dict[str, dict[str, Any]]:
    """Return the modules that the wrapper imports, as it uses them."""
    options = SimpleNamespace(
        **{
            "kt_weight_path": str(path),
            "kt_method": method,
            "kt_num_gpu_experts": 3,
            "kt_cpuinfer": 2,
            "kt_threadpool_count": 1,
            "kt_max_deferred_experts_per_token": None,
            **more,
        }
    )
    # One more copy of expert 0 would be EPLB's; without that, slots are experts.
    slots = torch.arange(E).repeat(LAYERS, 1)
    metadata = SimpleNamespace(physical_to_logical_map_cpu=slots)
    config = SimpleNamespace(**checkpoints.config())
    bypassed = SimpleNamespace(format_is_bypassed=lambda chosen: False)
    return {
        "sglang.srt.arg_groups.overrides": {
            "model_config_of": lambda arguments: SimpleNamespace(hf_config=config)
        },
        "sglang.srt.layers.quantization.base_config": {"FusedMoEMethodBase": Base},
        "sglang.srt.runtime_context": {
            "get_exec": lambda: SimpleNamespace(moe=options),
            "get_parallel": lambda: SimpleNamespace(tp_rank=0),
            "get_schedule": lambda: SimpleNamespace(chunked_prefill_size=64),
        },
        "sglang.srt.utils": {"get_compiler_backend": lambda: "eager"},
        "sglang.srt.layers.moe.token_dispatcher": {"StandardCombineInput": gpu.Combine},
        "sglang.srt.layers.moe.topk": {"TopKOutputChecker": bypassed},
        "sglang.srt.eplb.expert_location_dispatch": {
            "get_global_expert_location_metadata": lambda: metadata
        },
    }


class Layer(Called):
    """What of FusedMoE the wrapper uses."""

    def __init__(self, client: ModuleType, number: int, kind: str) -> None:
        super().__init__()
        self.layer_id, self.top_k, self.num_experts = number, TOP, E
        self.intermediate_size_per_partition, self.moe_tp_size = INNER, 1
        config = client.create_kt_config_from_server_args(None, number)
        own = gpu.METHODS.get(kind, gpu.Method)()
        self.quant_method = client.KTEPWrapperMethod(own, config)
        self.quant_method.create_weights(self, E, H, INNER, torch.bfloat16)
        self.quant_method.create_moe_runner(self, RunnerConfig())
        for expert, parts in enumerate(checkpoints.sources(kind, number)[: config.num_gpu_experts]):
            own.load(self, expert, parts)
        self.quant_method.process_weights_after_loading(self)


def on_one_stream(cuda: Cuda, patch: pytest.MonkeyPatch) -> None:
    """Let the main stream be one of the driver: all that this client does is on it.

    The sum of both parts is on it as well; it is computed at once, so the result has to be there.
    """
    if cuda.driver is None:
        return
    cuda.current = cuda.make()
    sync = KTMoEWrapper.sync_forward

    def waiting(self: KTMoEWrapper, *arguments: Any) -> torch.Tensor:
        result = sync(self, *arguments)
        cuda.current.synchronize()
        return result

    patch.setattr(KTMoEWrapper, "sync_forward", waiting)


def model(
    patch: pytest.MonkeyPatch, files: Path, path: Path, method: str, kind: str, **more: Any
) -> list[Layer]:
    """Make the layers of a model, as the engine does when it starts."""
    client = stage(patch, files, standins(path, method, **more), NAME)
    assert client.KTRANSFORMERS_AVAILABLE
    assert client.KTMoEWrapper is KTMoEWrapper
    return [Layer(client, number, kind) for number in range(LAYERS)]
