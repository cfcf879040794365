"""SGLang's engine on CPUs: which of its methods ktk surrounds.

A hook is called with the method, then with the method's own arguments. It calls the method where
ktk does not compute the layer. Nothing here is promised by SGLang: tests/sglang looks at names and
arguments in its wheel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ktk.sglang import experts, linears, zero_experts

_PACKAGE = "sglang.srt.layers.quantization"
_EXPERTS = (
    "unquant.UnquantizedFusedMoEMethod",
    "fp8.Fp8MoEMethod",
    "w8a8_int8.W8A8Int8MoEMethod",
)
_LINEARS = ("fp8.Fp8LinearMethod", "w8a8_int8.W8A8Int8LinearMethod")
# A function, which several models import by its name: SGLang's registry finds it in all of them.
_ZERO_EXPERTS = "sglang.kernels.ops.moe.ep_moe_kernels.zero_experts_compute_triton"


def hooks() -> dict[str, Callable[..., Any]]:
    """Return what is called around which methods and functions, by their full names."""
    of_experts = (experts.create_weights, experts.process_weights_after_loading, experts.apply)
    of_linears = (linears.process_weights_after_loading, linears.apply)
    methods = {
        f"{_PACKAGE}.{name}.{hook.__name__}": hook
        for names, each in ((_EXPERTS, of_experts), (_LINEARS, of_linears))
        for name in names
        for hook in each
    }
    return {**methods, _ZERO_EXPERTS: zero_experts.zero_experts_compute_triton}


def register() -> None:
    """Surround the methods, where SGLang computes on a CPU and ktk is wanted."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.utils import is_cpu

    from ktk.sglang.choice import takes_over

    if not is_cpu() or not takes_over():
        return
    for target, hook in hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)
