"""SGLang's layers of experts on ktk: tensors are packed as they are loaded, an expert at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ktk.config import MoEConfig
from ktk.hosts.choice import backend_name
from ktk.hosts.op import OpLayer
from ktk.hosts.zero_experts import without_weightless
from ktk.loading.collector import ExpertCollector
from ktk.sglang.choice import say_once
from ktk.sglang.place import pool_here

_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_STEMS = ("w13", "w2")
_IGNORED = "input_scale"
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
# Where a layer has what is written here: its collector, and what it has become.
_COLLECTOR, _PACKED = "ktk_collector", "ktk_layer"

Stored = tuple[tuple[str, ...], Mapping[str, Any] | None]


def stored_by(method: Any) -> Stored | None:
    """Return the tensors of a matrix that a method of SGLang's loads, and their quantization.

    None: ktk reads no such matrices.
    """
    name = type(method).__name__
    if name == "UnquantizedFusedMoEMethod":
        return ("weight",), None
    if name == "W8A8Int8MoEMethod":
        groups = {"group_0": {"targets": ["Linear"], "weights": _INT8}}
        return ("weight", "weight_scale"), {
            "quant_method": "compressed-tensors",
            "config_groups": groups,
        }
    if name != "Fp8MoEMethod" or method.is_fp4_expert:
        return None
    config = method.quant_config
    if not config.is_checkpoint_fp8_serialized:
        return None
    if method.use_mxfp8:
        return ("weight", "weight_scale_inv"), {"quant_method": "mxfp8"}
    if method.block_quant:
        blocks = list(config.weight_block_size)
        return ("weight", "weight_scale_inv"), {
            "quant_method": "fp8",
            "weight_block_size": blocks,
        }
    return ("weight", "weight_scale"), {"quant_method": "fp8"}


def activation_of(runner: Any) -> dict[str, Any] | None:
    """Return the fields of `ktk.MoEConfig` that say what a layer computes; None if ktk does not.

    Parameters
    ----------
    runner
        SGLang's `MoeRunnerConfig`.
    """
    if runner.activation != "silu" or not runner.is_gated or runner.gemm1_beta not in (None, 1.0):
        return None
    if runner.gemm1_alpha is not None:
        limit = runner.gemm1_clamp_limit
        return {
            "activation": "swigluoai",
            "activation_alpha": float(runner.gemm1_alpha),
            "activation_limit": None if limit is None else float(limit),
        }
    limit = runner.swiglu_limit if runner.gemm1_clamp_limit is None else runner.gemm1_clamp_limit
    return {"activation": "silu", "activation_limit": float(limit) if limit else None}


def unable(method: Any, layer: Any, extra: Mapping[str, Any]) -> str:
    """Return why ktk does not compute a layer of SGLang's; empty if it does."""
    runner = layer.moe_runner_config
    if stored_by(method) is None:
        return f"weights of {type(method).__name__} in this form"
    if activation_of(runner) is None:
        return f"the activation {runner.activation}"
    if runner.no_combine:
        return "routing weights that are applied elsewhere"
    if extra.get("with_bias") or layer.use_presharded_weights:
        return "biases, or weights that are divided already"
    if getattr(extra.get("weight_loader"), "__name__", "") != "weight_loader":
        return "tensors of all experts in one"
    return ""


def create_weights(
    original: Callable[..., None],
    method: Any,
    layer: Any,
    num_experts: int,
    hidden_size: int,
    intermediate_size_per_partition: int,
    params_dtype: torch.dtype,
    **extra: Any,
) -> None:
    """Register a parameter without elements for each kind of tensor: loading them fills ktk."""
    if why := unable(method, layer, extra):
        say_once(f"SGLang computes some experts itself: ktk does not do {why}")
        sizes = (num_experts, hidden_size, intermediate_size_per_partition, params_dtype)
        names = ("num_experts", "hidden_size", "intermediate_size_per_partition", "params_dtype")
        return original(method, layer, **dict(zip(names, sizes, strict=True)), **extra)
    roles, quantization = stored_by(method) or ((), None)
    ranks = layer.moe_tp_size
    config = MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=min(layer.top_k, num_experts),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size_per_partition * ranks,
        apply_router_weight_on_input=layer.moe_runner_config.apply_router_weight_on_input,
        **(activation_of(layer.moe_runner_config) or {}),
    )
    collector = ExpertCollector(
        config,
        roles,
        quantization=quantization,
        backend=backend_name(),
        rank=layer.moe_tp_rank,
        ranks=ranks,
        pool=pool_here(),
        name=layer.layer_name,
    )
    for stem in _STEMS:
        for role in (*roles, _IGNORED):
            param = torch.nn.Parameter(
                torch.empty(0, dtype=params_dtype, device="cpu"), requires_grad=False
            )
            param.weight_loader = extra["weight_loader"]  # type: ignore[attr-defined]
            param.role = role  # type: ignore[attr-defined]
            layer.register_parameter(f"{stem}_{role}", param)

    def take(
        param: Any, loaded_weight: torch.Tensor, weight_name: str, shard_id: str, expert_id: int
    ) -> None:
        if param.role == _IGNORED:
            return
        packed = layer.__dict__.get(_PACKED)
        if packed is not None:
            # SGLang updates weights, and may say nothing afterwards. Their memory is the caller's.
            packed.renew(collector.finish)
            loaded_weight = loaded_weight.clone()
        collector.take(expert_id, _PARTS[shard_id], param.role, loaded_weight)

    # What the layer's own loader calls when it knows the number of the expert here.
    layer._weight_loader_impl = take
    setattr(layer, _COLLECTOR, collector)
    return None


def process_weights_after_loading(original: Callable[..., None], method: Any, layer: Any) -> None:
    """Put the packed layer in its place, when all tensors came; also after an update."""
    collector = layer.__dict__.get(_COLLECTOR)
    if collector is None:
        return original(method, layer)
    moe = collector.finish()
    packed = layer.__dict__.get(_PACKED)
    if packed is not None:
        packed.renewed(moe)
        return None
    setattr(layer, _PACKED, OpLayer(moe, layer.layer_name))
    say_once(
        f"ktk computes experts with {moe.backend.name}/{moe.variant}, stored as {moe.format}, on "
        f"CPUs {', '.join(map(str, moe.pool.cpus))}"
    )
    return None


def apply(original: Callable[..., Any], method: Any, layer: Any, dispatch_output: Any) -> Any:
    """Compute the experts of this rank."""
    packed = layer.__dict__.get(_PACKED)
    if packed is None:
        return original(method, layer, dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    chosen = dispatch_output.topk_output
    hidden, ids = dispatch_output.hidden_states, chosen.topk_ids
    if not packed.moe.config.apply_router_weight_on_input:
        ids = without_weightless(ids, chosen.topk_weights)
    return StandardCombineInput(hidden_states=packed(hidden, ids, chosen.topk_weights))
