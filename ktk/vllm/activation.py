"""Which function of gate and up vLLM's layers of experts compute, in the words of ktk."""

from __future__ import annotations

from typing import Any

from ktk.config import ACTIVATIONS

# Of gpt-oss, where the layer does not say it.
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
_OAI = ("swigluoai", "swigluoai_uninterleave")
# Of Step-3.5. vLLM computes it with no other limit, and its model does not say one.
_STEP_LIMIT = 7.0
# With constants of their own.
_MORE = ("swiglustep", "situ")


def activation_of(moe: Any) -> dict[str, Any] | None:
    """Return the fields of `ktk.MoEConfig` that say what a layer computes; None if ktk does not.

    Parameters
    ----------
    moe
        vLLM's `FusedMoEConfig`.
    """
    name, alpha, limit, beta = (
        moe.activation.value,
        moe.swiglu_alpha,
        moe.swiglu_limit,
        moe.swiglu_beta,
    )
    if name in _OAI and beta in (None, 1.0):
        return {
            "activation": "swigluoai",
            "activation_alpha": _OAI_ALPHA if alpha is None else alpha,
            "activation_limit": _OAI_LIMIT if limit is None else limit,
        }
    if name == "swiglustep" and limit in (None, _STEP_LIMIT):
        return {"activation": name, "activation_limit": _STEP_LIMIT}
    if name == "situ" and moe.activation_situ_beta is not None:
        # vLLM clamps neither gate nor up of this one.
        return {
            "activation": name,
            "gate_softcap": moe.activation_situ_beta,
            "up_softcap": moe.activation_situ_linear_beta,
        }
    # Others have the same names as in ktk.
    if name in ACTIVATIONS and name not in _OAI + _MORE and alpha is None and beta is None:
        return {"activation": name, "activation_limit": limit or None}
    return None
