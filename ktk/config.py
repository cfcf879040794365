"""What a layer of experts is."""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ktk._core import activation_names

#: Names of the activation functions; `MoEConfig` has their definitions.
ACTIVATIONS = tuple(activation_names())
#: What else checkpoints call them (`hidden_act` of config.json). transformers has the tanh form of
#: GELU under two names.
SPELLINGS = {
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
#: The matrices of an expert, in the order of all arguments and files.
PARTS = ("gate", "up", "down")
#: The fields of `MoEConfig` that are sizes.
SIZES = ("num_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")

#: No layer has more experts, or wider matrices.
_MOST = 1 << 24


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Sizes and activation function of one layer of experts.

    With ``g = gate @ x + gate_bias`` and ``u = up @ x + up_bias``, an expert computes
    ``down @ act(g, u) + down_bias``, where ``act`` is one of the functions below. Experts without a
    gate compute ``down @ f(u) + down_bias``, where ``f`` is what the function does to ``g``.
    `ktk.testing.activations` says where each formula comes from.

    ``silu``
        ``silu(g) * u``.
    ``swigluoai``
        ``g * sigmoid(activation_alpha * g) * (u + 1)``: gpt-oss, MiniMax-M3.
    ``gelu_tanh``
        ``gelu_tanh(g) * u``, the tanh form of GELU.
    ``gelu``
        ``g * Phi(g) * u`` with the distribution function of the standard normal distribution.
    ``relu``
        ``max(g, 0) * u``: SmallThinker.
    ``relu2``
        ``max(g, 0)**2 * u``.
    ``swiglustep``
        ``silu(g) * u``, where `activation_limit` clamps ``silu(g)`` in the place of ``g``:
        Step-3.7.
    ``situ``
        ``gate_softcap * tanh(g / gate_softcap) * sigmoid(g) * up_softcap * tanh(u / up_softcap)``,
        where the factor of up is ``u`` itself without `up_softcap`: Inkling-2 and Kimi-K3.

    Parameters
    ----------
    num_experts : int
        Experts of the layer.
    num_experts_per_tok : int
        Experts that each token names (top-k), as a rule: a call may name more of them, or fewer.
    hidden_size : int
        Width of the layer's input and output.
    intermediate_size : int
        Width of gate and up.
    activation : str
        One of the names above.
    activation_limit : float, optional
        Before the function, ``g`` is clamped to at most ``activation_limit`` and ``u`` to
        ``[-activation_limit, activation_limit]``. None: no clamp.
    activation_alpha : float
        Slope of the sigmoid of ``swigluoai``.
    clamp_gate_below : bool
        Also clamp ``g`` to at least ``-activation_limit``: how kt-kernel computes MiniMax-M3. The
        model itself, as published for transformers, clamps ``g`` from above only; so does gpt-oss.
    gate_softcap, up_softcap : float, optional
        The sizes that ``situ`` keeps its factors below, of which it needs the first; no other
        activation takes them.
    gated : bool
        Whether experts have a gate. Nemotron-H's have none: ``relu2`` of up. What is said of ``g``
        then holds for ``u``, its clamps, too.
    apply_router_weight_on_input : bool
        Whether routing weights multiply what goes into experts, and what comes out is added as it
        is: ``g = gate @ (weight * x) + gate_bias``, and so ``u``. Llama-4. vLLM's name.
    zero_expert_num : int
        How many zero experts there are beside these. A zero expert has no weights and returns what
        goes in: with E experts and Z zero experts, an id from E to E + Z - 1 adds ``weight * x`` to
        a token's result, where ``x`` is the row of hidden states as the caller gave it, of
        `hidden_size` of these experts; and the same where routing weights multiply what goes in.
        Other ids outside of the experts contribute nothing. LongCat-Flash. Its config.json's name,
        and vLLM's.
    """

    num_experts: int
    num_experts_per_tok: int
    hidden_size: int
    intermediate_size: int
    activation: str = "silu"
    activation_limit: float | None = None
    activation_alpha: float = 1.702
    clamp_gate_below: bool = False
    gate_softcap: float | None = None
    up_softcap: float | None = None
    gated: bool = True
    apply_router_weight_on_input: bool = False
    zero_expert_num: int = 0

    def __post_init__(self) -> None:
        self._check_activation()
        for name in (*SIZES, "zero_expert_num"):
            value = getattr(self, name)
            least = int(name != "zero_expert_num")
            whole = _whole(value)
            if whole is None or not least <= whole <= _MOST:
                raise ValueError(
                    f"{name} must be an integer from {least} to {_MOST}, got {value!r}"
                )
            object.__setattr__(self, name, whole)
        if self.num_experts_per_tok > self.num_ids:
            raise ValueError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, "
                f"but there are only {self.num_ids} experts"
            )
        limit, alpha = self.activation_limit, self.activation_alpha
        if limit is not None and not (0 < _as_f32(limit) < math.inf or limit == math.inf):
            raise ValueError(
                f"activation_limit must be a positive number or None, got {_shown(limit)}"
            )
        if not math.isfinite(_as_f32(alpha)):
            raise ValueError(f"activation_alpha must be a number, got {_shown(alpha)}")
        for name in ("clamp_gate_below", "gated", "apply_router_weight_on_input"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be a bool, got {getattr(self, name)!r}")
        self._check_softcaps()

    @property
    def parts(self) -> tuple[str, ...]:
        """The matrices of an expert, which are gate, if there is one, up and down."""
        return PARTS if self.gated else PARTS[1:]

    @property
    def num_ids(self) -> int:
        """Ids that name an expert or a zero expert, from 0 to one less than this."""
        return self.num_experts + self.zero_expert_num

    def _check_softcaps(self) -> None:
        for name in ("gate_softcap", "up_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < _as_f32(value) < math.inf:
                raise ValueError(f"{name} must be a positive number or None, got {_shown(value)}")
            if value is not None and self.activation != "situ":
                raise ValueError(f"the activation {self.activation!r} does not take {name}")
        if self.gate_softcap is None and self.activation == "situ":
            raise ValueError("the activation 'situ' needs gate_softcap")

    def _check_activation(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"activation must be one of {', '.join(ACTIVATIONS)}, got {self.activation!r}"
            )


def _whole(value: Any) -> int | None:
    """Return an int of any library; None for what is none, and for a bool."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _as_f32(value: Any) -> float:
    """Return a number as the core keeps it; NaN for what is none."""
    number: Any = value if isinstance(value, Real) else math.nan
    try:
        return float(struct.unpack("f", struct.pack("f", float(number)))[0])
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _shown(value: Any) -> str:
    """Return a number for a message, and what f32 makes of it."""
    held = _as_f32(value)
    changed = isinstance(value, Real) and value != held and held in (0, math.inf, -math.inf)
    return f"{value!r}, which is {held} in f32" if changed else repr(value)


def activation_called(name: str) -> str | None:
    """Return the activation function that checkpoints call so; None if ktk does not compute it."""
    found = SPELLINGS.get(name, name)
    return found if found in ACTIVATIONS else None
