"""What the constructor's arguments, and the environment, mean here."""

from __future__ import annotations

import logging
import math
import operator
import os
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

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


@cache
def warn_once(message: str) -> None:
    """Warn once in a process: a model has many layers alike."""
    logger.warning(message)


def refuse_sft(mode: str, method: str, **arguments: Any) -> None:
    """Refuse fine-tuning; arguments that only it has must have their defaults."""
    if mode not in ("inference", "sft"):
        raise ValueError(f'mode must be "inference", got {mode!r}')
    changed = [
        f"{name}={value!r}" for name, value in arguments.items() if value != _SFT_DEFAULTS[name]
    ]
    if mode == "sft" or "_SFT" in str(method).upper():
        words = ", ".join([f"mode={mode!r}", f"method={method!r}", *changed])
        raise NotImplementedError(
            f"ktk computes inference only, it has no fine-tuning mode; got {words}"
        )
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: an argument of the fine-tuning mode, which ktk does not have"
        )


def integer(value: Any) -> Any:
    """Return an integer of any library as Python's; what is none is refused where it is used."""
    try:
        return operator.index(value)
    except TypeError:
        return value


def at_least(name: str, value: Any, least: int) -> int:
    """Return an argument that counts something."""
    number = integer(value)
    if not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
    return number


def warn_of_variables() -> None:
    """Say that what kt-kernel reads from the environment is not read."""
    names = [
        name
        for name in sorted(os.environ)
        if name == "KT_KERNEL_CPU_VARIANT" or (name.startswith("KT_") and name.endswith("_BACKEND"))
    ]
    if names:
        warn_once(
            f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} set, but ktk does not read "
            "kt-kernel's variables: KTK_ISA=avx2, for example, caps the instruction sets"
        )


def warn_of_path(path: str | Path | None) -> None:
    """Say that there is nothing where the weights should be.

    That is no error yet: a layer may be filled from tensors, and its path be a name only.
    """
    if path and not Path(path).exists():
        warn_once(f"weight_path {path} does not exist: load_weights will fail")


def activation(swiglu_limit: float, swiglu_alpha: float) -> dict[str, Any]:
    """Return the fields of MoEConfig that two numbers of kt-kernel stand for.

    With neither, a checkpoint's own activation function holds, and SiLU without one. A limit alone
    clamps gate from above and up on both sides before silu(gate) * up (DeepSeek-V4); with an alpha,
    both are clamped on both sides, and the function is gate * sigmoid(alpha * gate) * (up + 1)
    (MiniMax-M3).
    """
    for name, number in (("swiglu_limit", swiglu_limit), ("swiglu_alpha", swiglu_alpha)):
        if not isinstance(number, Real) or not 0 <= number < math.inf:
            raise ValueError(f"{name} must be a number and not negative, got {number!r}")
    limit = float(swiglu_limit) or None
    if swiglu_alpha:
        return {
            "activation": "swigluoai",
            "activation_alpha": float(swiglu_alpha),
            "activation_limit": limit,
            "clamp_gate_below": limit is not None,
        }
    return {"activation": "silu", "activation_limit": limit} if limit else {}
