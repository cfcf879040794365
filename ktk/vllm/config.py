"""The quantization method "ktk" of vLLM: a checkpoint's own, with layers that ktk computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.platforms import current_platform

from ktk.system import let_openmp_sleep
from ktk.vllm.choice import METHOD, say_once, takes_over
from ktk.vllm.experts import KtkExperts, KtkUnquantized, unable
from ktk.vllm.linears import stock_or_ktk

# vLLM's names of what ModelOpt writes, which calls all of it "modelopt".
_MODELOPT = ("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed")
# What vLLM says where none of its kernels will do.
_REFUSALS = (NotImplementedError, RuntimeError, ValueError, AssertionError)


class KtkQuantization(QuantizationConfig):  # type: ignore[misc]
    """What ktk does with a model, quantised or not; vLLM's own configuration does the rest."""

    def __init__(self, quantization: Mapping[str, Any] | None = None) -> None:
        let_openmp_sleep()  # vLLM makes one of these before it starts workers
        self.quantization = quantization
        self.stock: Any = None
        if quantization:
            kind = get_quantization_config(_name_of(quantization))
            self.stock = kind.from_config(dict(quantization))
        super().__init__()

    @classmethod
    def get_name(cls) -> str:
        """Return what `--quantization` calls this."""
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """Return the dtypes that a model may have."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return the least that a GPU must have, which ktk needs none of."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return the files beside config.json that are read: none."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KtkQuantization:
        """Make one of the quantization_config of a checkpoint."""
        return cls(config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Return the name of this where it is to load a checkpoint; vLLM asks all methods."""
        if not isinstance(hf_quant_cfg, Mapping):
            return None
        taken = takes_over(hf_quant_cfg, user_quant, current_platform.is_cpu())
        return METHOD if taken else None

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """Return what computes a layer."""
        if isinstance(layer, RoutedExperts):
            return self._experts(layer, prefix)
        if not isinstance(layer, LinearBase):
            return self.stock and self.stock.get_quant_method(layer, prefix)
        if self.stock is None:
            return UnquantizedLinearMethod()
        return stock_or_ktk(self.stock, layer, prefix, self.quantization, _REFUSALS)

    def _experts(self, layer: Any, prefix: str) -> Any:
        stock, refusal = None, None
        if self.stock is not None:
            try:
                stock = self.stock.get_quant_method(layer, prefix)
            except _REFUSALS as error:
                refusal = error
        is_float = self.stock is None or (
            refusal is None and (stock is None or isinstance(stock, UnquantizedFusedMoEMethod))
        )
        quantization = None if is_float else self.quantization
        reason = unable(layer, quantization)
        if not reason:
            moe = layer.moe_config
            return KtkUnquantized(moe) if is_float else KtkExperts(moe, quantization)
        say_once(f"vLLM computes experts itself: ktk does not compute {reason}")
        if refusal is not None:
            raise refusal
        return stock or UnquantizedFusedMoEMethod(layer.moe_config)

    # --- what the checkpoint's own method knows -------------------------------------------------

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        """Names of layers that vLLM puts together of several."""
        return self._packed_modules

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, value: dict[str, list[str]]) -> None:
        self._packed_modules = value
        if self.stock is not None:
            self.stock.packed_modules_mapping = value

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Rename layers that the checkpoint leaves in floats."""
        if self.stock is not None:
            self.stock.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        """Return the names of scales of the cache."""
        return (self.stock or QuantizationConfig).get_cache_scale_mapper()

    def get_checkpoint_weight_mapper(self) -> Any:
        """Return which tensors are not to be loaded."""
        return (self.stock or QuantizationConfig).get_checkpoint_weight_mapper()

    def maybe_update_config(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        """Let the checkpoint's method read what else it wants."""
        if self.stock is not None:
            self.stock.maybe_update_config(model_name, *args, **kwargs)


def _name_of(quantization: Mapping[str, Any]) -> str:
    """Return what vLLM calls the way in which a checkpoint is stored."""
    method = str(quantization["quant_method"])
    for name in _MODELOPT if method == _MODELOPT[0] else ():
        kind = get_quantization_config(name)
        if kind.override_quantization_method(quantization, None) is not None:
            return name
    return method


def register() -> None:
    """Add the method to vLLM's."""
    register_quantization_config(METHOD)(KtkQuantization)
