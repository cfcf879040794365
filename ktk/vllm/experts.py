"""vLLM's layers of experts on ktk: tensors are packed as they are loaded, an expert at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)

from ktk.config import MoEConfig
from ktk.errors import CheckpointError
from ktk.hosts.choice import backend_name
from ktk.hosts.op import OpLayer
from ktk.hosts.stored import IGNORED, refused, roles_of
from ktk.hosts.zero_experts import without_weightless
from ktk.loading.collector import ExpertCollector
from ktk.moe import MoE
from ktk.vllm.activation import activation_of
from ktk.vllm.choice import say_once
from ktk.vllm.place import loads_dummies, number_of, pool_here
from ktk.vllm.reload import announce, is_counting

_PARTS = {"w1": "gate", "w3": "up", "w2": "down"}
_STEMS = {"w13": ("gate", "up"), "w2": ("down",)}
# What vLLM calls the tensors of gpt-oss, which all experts share.
_SHARED = {"weight": "blocks", "weight_scale": "scales", "bias": "bias"}


def unable(layer: Any, quantization: Mapping[str, Any] | None) -> str:
    """Return why ktk does not compute a layer of vLLM's; empty if it does."""
    moe = layer.moe_config
    if roles_of(quantization) is None:
        stored = dict(quantization or {})
        return refused(stored, "vLLM") or f"weights stored as {stored.get('quant_method')}"
    if not moe.is_act_and_mul or activation_of(moe) is None:
        return f"the activation {moe.activation.value}"
    if moe.is_lora_enabled:
        return "LoRA"
    return ""


class _Experts:
    """What a layer of experts does; vLLM's base class beside it says when."""

    moe: Any
    quantization: Mapping[str, Any] | None = None
    _layer: Any
    _packed: OpLayer | None = None
    _collector: ExpertCollector | None = None
    number: int

    # --- what vLLM asks -------------------------------------------------------------------------

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer routes tokens itself."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """Whether experts may be moved between ranks later."""
        return False

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return what vLLM's own kernels want to know."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register a parameter without elements for each kind of tensor: loading them fills ktk."""
        self._name = layer.layer_name
        self._expert_map = layer.expert_map
        self._has_expert_map = self._expert_map is not None
        self.number = number_of(self._name)
        self._is_dummy = loads_dummies()
        self._shared: dict[str, torch.Tensor] = {}
        roles = roles_of(self.quantization)
        assert roles is not None, "the layer was looked at before"
        self._roles = roles
        self._is_shared = roles == tuple(_SHARED.values())[:2]
        self._sizes = {
            **(activation_of(self.moe) or {}),
            "num_experts": num_experts,
            "num_experts_per_tok": min(layer.top_k, num_experts),
            "hidden_size": hidden_size,
            "apply_router_weight_on_input": layer.apply_router_weight_on_input,
        }
        names = tuple(_SHARED)[:2] if self._is_shared else (*roles, *IGNORED)
        for stem, parts in _STEMS.items():
            for role in (*names, *(("bias",) if self.moe.has_bias else ())):
                param = torch.nn.Parameter(
                    torch.empty(0, dtype=params_dtype, device="cpu"), requires_grad=False
                )
                param.weight_loader = self._take  # type: ignore[attr-defined]
                param.role = role  # type: ignore[attr-defined]
                tensors = 1 if self._is_shared else num_experts * len(parts)
                announce(param, 0 if role in IGNORED else tensors)
                layer.register_parameter(f"{stem}_{role}", param)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the packed layer in its place, when all tensors came; also when they came again."""
        if self._collector is None and self._packed is not None:
            return
        dummy = self._is_dummy and self._collector is None
        moe = self._made_up() if dummy else self._finish()
        if self._packed is None:
            self._packed = OpLayer(moe, self._name, self.number)
        self._packed.renewed(moe)
        say_once(
            f"ktk computes experts with {moe.backend.name}/{moe.variant}, stored as {moe.format}, "
            f"on CPUs {', '.join(map(str, moe.pool.cpus))}"
        )

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the experts of this rank; those of others are not among its numbers."""
        if self._has_expert_map:
            # The map's last row is no answer to an id of -1.
            topk_ids = layer.expert_map[topk_ids.long()].masked_fill_(topk_ids < 0, -1)
        if not layer.apply_router_weight_on_input:  # where biases count, whatever the weight
            topk_ids = without_weightless(topk_ids, topk_weights)
        result: torch.Tensor = torch.ops.ktk.moe(x, topk_ids, topk_weights, self.number)
        return result

    # --- loading --------------------------------------------------------------------------------

    def _take(
        self,
        param: Any,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Take a tensor of one expert, or of all; vLLM calls this for each that it reads."""
        expert = expert_id
        if expert is not None and self._expert_map is not None:
            expert = int(self._expert_map[expert])
        taken = expert is None or expert >= 0
        # Llama-4's are of all experts that are here, of which it names the first.
        of_all = loaded_weight.ndim == 3 and expert is not None and self._roles == ("weight",)
        tensors = len(loaded_weight) if of_all else 1
        if taken and param.role not in IGNORED and not is_counting(param, tensors):
            if self._packed is not None:
                # vLLM's models load weights again, and may say nothing afterwards. The memory of
                # these is the caller's.
                self._packed.renew(self._finish)
                loaded_weight = loaded_weight.clone()
            if expert is None or shard_id is None:
                self._take_shared(loaded_weight, weight_name)
            else:
                each = loaded_weight if of_all else loaded_weight[None]
                for number, one in enumerate(each, expert):
                    self._collecting().take(number, _PARTS[shard_id], param.role, one)
        return taken if return_success else None

    def _take_shared(self, loaded: torch.Tensor, name: str) -> None:
        """Hold tensors of all experts, already cut for this rank, until all of them came."""
        self._shared[name.rpartition(".")[2]] = loaded
        names = [f"{stem}_{role}" for stem in _STEMS for role in _SHARED]
        if not all(one in self._shared for one in names):
            return
        inner = self._shared["w13_weight"].shape[1] // 2
        collector = self._collecting(inner, interleaved=True)
        for expert in range(self._sizes["num_experts"]):
            for stem, part in (("w13", "gate_up"), ("w2", "down")):
                for role, called in _SHARED.items():
                    one = self._shared[f"{stem}_{role}"][expert]
                    if called == "blocks":
                        one = one.reshape(one.shape[0], -1, 16)
                    collector.take(expert, part, called, one)
        self._shared = {}

    def _finish(self) -> MoE:
        """Return the packed layer, if nothing that it needs is still to come."""
        if self._shared:
            came = ", ".join(sorted(self._shared))
            raise CheckpointError(f"{self._name}: of the tensors of all experts only {came} came")
        return self._collecting().finish()

    def _made_up(self) -> MoE:
        """Return random experts, where vLLM is to measure, or reads others later."""
        collector = self._collector_of(("weight",), None)
        hidden, inner = self._sizes["hidden_size"], self.moe.intermediate_size
        sizes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        random = {
            part: torch.randn(size, dtype=torch.float32, device="cpu").bfloat16() / 64
            for part, size in sizes.items()
        }
        for expert in range(self._sizes["num_experts"]):
            for part, (rows, _) in sizes.items():
                collector.take(expert, part, "weight", random[part])
                if self.moe.has_bias:
                    bias = torch.zeros(rows, dtype=torch.float32, device="cpu")
                    collector.take(expert, part, "bias", bias)
        return collector.finish()

    def _collecting(self, inner: int | None = None, **options: Any) -> ExpertCollector:
        """Return what packs the tensors that come, the first time and later."""
        if self._collector is None:
            self._collector = self._collector_of(self._roles, self.quantization, inner, **options)
        return self._collector

    def _collector_of(
        self,
        roles: Sequence[str],
        quantization: Mapping[str, Any] | None,
        inner: int | None = None,
        **options: Any,
    ) -> ExpertCollector:
        parallel = self.moe.moe_parallel_config
        ranks = {"rank": parallel.tp_rank, "ranks": parallel.tp_size} if inner is None else {}
        return ExpertCollector(
            MoEConfig(intermediate_size=inner or self.moe.intermediate_size, **self._sizes),
            roles,
            quantization=quantization,
            backend=backend_name(),
            bias=self.moe.has_bias,
            # vLLM says which process this is only while it makes the model.
            pool=pool_here() if self._packed is None else self._packed.moe.pool,
            name=self._name,
            **ranks,
            **options,
        )


class KtkExperts(_Experts, FusedMoEMethodBase):  # type: ignore[misc]
    """Experts of a quantised checkpoint."""

    def __init__(self, moe: Any, quantization: Mapping[str, Any] | None) -> None:
        super().__init__(moe)
        self.quantization = quantization


class KtkUnquantized(_Experts, UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Experts of floats, in the place of vLLM's own class."""

    _refusal: Exception | None = None

    def __init__(self, moe: Any) -> None:
        try:
            super().__init__(moe)
        except (NotImplementedError, ValueError) as error:
            # It has no kernel for these, which says nothing about ktk.
            self._refusal = error
            self.supports_pre_processed_weights = False

    def maybe_roundup_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Return the sizes that vLLM's kernel has, if there is one."""
        base = FusedMoEMethodBase if self._refusal else UnquantizedFusedMoEMethod
        sizes: tuple[int, int] = base.maybe_roundup_sizes(self, *args, **kwargs)
        return sizes

    def create_weights(self, layer: Any, num_experts: int, *args: Any, **kwargs: Any) -> None:
        """Register parameters; of layers that ktk does not compute, become vLLM's own class."""
        self._is_whole = False
        if reason := unable(layer, None):
            say_once(f"vLLM computes experts itself: ktk does not compute {reason}")
            if self._refusal is not None:
                raise self._refusal
            self.__class__ = UnquantizedFusedMoEMethod
            self.create_weights(layer, num_experts, *args, **kwargs)
            return
        super().create_weights(layer, num_experts, *args, **kwargs)
        if self.moe.has_bias:
            # gpt-oss copies its tensors into parameters without asking these for a loader.
            self._is_whole = True
            UnquantizedFusedMoEMethod.create_weights(self, layer, num_experts, *args, **kwargs)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack what was loaded."""
        if self._is_whole and layer.w13_weight.numel():
            self._take_whole(layer)
        super().process_weights_after_loading(layer)

    def _take_whole(self, layer: Any) -> None:
        """Pack tensors of all experts, cut for this rank, and free them."""
        names = [f"{stem}_{role}" for stem in _STEMS for role in ("weight", "bias")]
        tensors = {name: getattr(layer, name).data for name in names}
        # vLLM calls the same function "swigluoai_uninterleave" where all gates come first.
        interleaved = self.moe.activation.value == "swigluoai"
        inner = tensors["w13_weight"].shape[1] // 2
        collector = self._collecting(inner, interleaved=interleaved)
        for expert in range(self._sizes["num_experts"]):
            for stem, part in (("w13", "gate_up"), ("w2", "down")):
                for role in ("weight", "bias"):
                    collector.take(expert, part, role, tensors[f"{stem}_{role}"][expert])
        for name in names:
            getattr(layer, name).data = torch.empty(0, dtype=torch.float32, device="cpu")


def register() -> None:
    """Have ktk compute experts of floats."""
    if UnquantizedFusedMoEMethod.__name__ not in _replaced():
        UnquantizedFusedMoEMethod.register_oot(KtkUnquantized)


def _replaced() -> Any:
    from vllm.model_executor.custom_op import op_registry_oot

    return op_registry_oot
