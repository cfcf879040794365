"""What the constructor's arguments mean here."""

from __future__ import annotations

from typing import Any

# Arguments of kt-kernel's fine-tuning mode, with the values that mean nothing is asked for.
_SFT_DEFAULTS: dict[str, Any] = {
    "lora_rank": 16,
    "lora_alpha": 32.0,
    "lora_dropout": 0.0,
    "max_cache_depth": 1,
    "group_size": 128,
    "zero_point": True,
    "full_weight_grad": False,
}


def refuse_sft(mode: str, method: str, arguments: dict[str, Any]) -> None:
    """Refuse fine-tuning, and arguments that nobody knows."""
    unknown = arguments.keys() - _SFT_DEFAULTS.keys()
    if unknown:
        raise TypeError(f"KTMoEWrapper got an unexpected keyword argument {min(unknown)!r}")
    if mode not in ("inference", "sft"):
        raise ValueError(f'mode must be "inference", got {mode!r}')
    asked = [f"{name}={value!r}" for name, value in arguments.items()]
    changed = [
        f"{name}={value!r}" for name, value in arguments.items() if value != _SFT_DEFAULTS[name]
    ]
    if mode == "sft" or "_SFT" in method.upper():
        words = ", ".join([f"mode={mode!r}", f"method={method!r}", *asked])
        raise NotImplementedError(
            f"ktk computes inference only, it has no fine-tuning mode; got {words}"
        )
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: an argument of the fine-tuning mode, which ktk does not have"
        )


def activation(swiglu_limit: float, swiglu_alpha: float) -> dict[str, Any]:
    """Return the fields of MoEConfig that two numbers of kt-kernel stand for.

    With neither, a checkpoint's own activation function holds, and SiLU without one. A limit alone
    clamps gate from above and up on both sides before silu(gate) * up (DeepSeek-V4); with an alpha,
    both are clamped on both sides, and the function is gate * sigmoid(alpha * gate) * (up + 1)
    (MiniMax-M3).
    """
    if swiglu_limit < 0 or swiglu_alpha < 0:
        raise ValueError(
            f"swiglu_limit and swiglu_alpha must not be negative, got {swiglu_limit} and "
            f"{swiglu_alpha}"
        )
    limit = float(swiglu_limit) or None
    if swiglu_alpha:
        return {
            "activation": "swigluoai",
            "activation_alpha": float(swiglu_alpha),
            "activation_limit": limit,
            "clamp_gate_below": limit is not None,
        }
    return {"activation": "silu", "activation_limit": limit} if limit else {}
