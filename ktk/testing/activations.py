"""The activation functions of experts in float64, and what float32 may lose of each.

An activation is a function of gate times a function of up. Adding one means: a `Factor` or two of
its formula, its derivative, and counts of roundings, and a line of `ACTIVATIONS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ktk.config import MoEConfig
from ktk.testing import bounds
from ktk.testing.bounds import TINY, UNIT, Array

#: What an implementation of exp may lose, in units of UNIT: four units in the last place.
EXP_UNITS = 8
#: Roundings of a function outside exp: add, divide, two products, one sum.
GLU_ROUNDINGS = 5
#: Roundings of an argument of exp: the cubic of GELU, its constants included, has the most.
ARGUMENT_ROUNDINGS = 8
#: Roundings of a slope that do not depend on the argument of exp, and those for each unit of the
#: argument: its own, which exp multiplies, twice because sigmoid and its complement have it.
SLOPE_ROUNDINGS, ROUNDINGS_OF_ARGUMENT = 32, 16

Function = Callable[[Array, MoEConfig], Array]


def _zero(x: Array, config: MoEConfig) -> Array:
    return np.zeros_like(x)


def _one(x: Array, config: MoEConfig) -> Array:
    return np.ones_like(x)


@dataclasses.dataclass(frozen=True)
class Factor:
    """A function of gate, or of up, in float64.

    Attributes
    ----------
    value, slope : callable
        The function and its derivative, of values and a configuration.
    steepest : callable
        Bounds ``|slope|`` at all values up to a size.
    roundings : int
        Of the function in float32, outside the argument of exp.
    argument : callable
        Size of the argument of exp, 0 for functions without exp.
    condition : callable
        How much the value changes for a relative change of that argument.
    terms : callable
        Sum of the sizes of what is added up to the slope.
    vanishes : bool
        Far out on the left an implementation may cut the function off to zero.
    """

    value: Function
    slope: Function
    steepest: Function
    roundings: int
    argument: Function = _zero
    condition: Function = _zero
    terms: Function | None = None
    vanishes: bool = False

    def own_error(self, x: Array, config: MoEConfig) -> Array:
        """Bound what an implementation in float32 loses of the value at x."""
        error: Array = bounds.gamma(self.roundings) * np.abs(self.value(x, config))
        error = error + bounds.gamma(ARGUMENT_ROUNDINGS) * 1.001 * self.condition(x, config)
        return error + (2 * TINY * (1 + np.abs(x)) if self.vanishes else 0)

    def slope_error(self, x: Array, config: MoEConfig) -> Array:
        """Bound what an implementation in float32 loses of the slope at x."""
        terms = np.abs(self.slope(x, config)) if self.terms is None else self.terms(x, config)
        units = SLOPE_ROUNDINGS + ROUNDINGS_OF_ARGUMENT * self.argument(x, config)
        vanishes = 2 * TINY * (1 + np.abs(x)) if self.vanishes else 0
        error: Array = units * UNIT * terms + vanishes
        return error


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)) without overflow."""
    result: Array = np.exp(-np.logaddexp(0, -x))
    return result


def sigmoid_times(argument: Function, argument_slope: Function, steepest: float) -> Factor:
    """Return ``x * sigmoid(argument(x))``; `steepest` bounds its slope everywhere."""

    def condition(x: Array, config: MoEConfig) -> Array:
        z = argument(x, config)
        result: Array = np.abs(x * z) * sigmoid(z) * sigmoid(-z)
        return result

    def inner(x: Array, config: MoEConfig) -> Array:
        return x * argument_slope(x, config) * sigmoid(-argument(x, config))

    return Factor(
        value=lambda x, config: x * sigmoid(argument(x, config)),
        slope=lambda x, config: sigmoid(argument(x, config)) * (1 + inner(x, config)),
        steepest=lambda size, config: np.full_like(size, steepest),
        roundings=EXP_UNITS + GLU_ROUNDINGS,
        argument=lambda x, config: np.abs(argument(x, config)),
        condition=condition,
        terms=lambda x, config: (
            sigmoid(argument(x, config)) * (1 + np.abs(inner(x, config))) + 2 * TINY
        ),
        vanishes=True,
    )


def _soft(cap: str) -> Factor:
    """Return ``c * tanh(x / c)`` for a field of the configuration, and x itself where it is None.

    tanh is a polynomial near 0 and ``1 - 2 / (exp(2 x) + 1)`` elsewhere, where tanh is above 1/2
    and the second term, with what exp loses, below 1/2: twice exp's units, and eight operations.
    """

    def c(config: MoEConfig) -> float:
        value = getattr(config, cap)
        return math.inf if value is None else float(value)

    return Factor(
        value=lambda x, config: c(config) * np.tanh(x / c(config)) if c(config) < math.inf else x,
        slope=lambda x, config: 1 - np.tanh(x / c(config)) ** 2,
        steepest=lambda size, config: np.ones_like(size),
        roundings=2 * EXP_UNITS + 2 * ARGUMENT_ROUNDINGS,
        terms=lambda x, config: np.ones_like(x),
    )


def _times_sigmoid(factor: Factor) -> Factor:
    """Return ``factor(x) * sigmoid(x)`` for a factor no larger than x and no steeper than 1."""
    half = sigmoid_times(lambda x, config: x, _one, 1.1)

    def inner(x: Array, config: MoEConfig) -> Array:
        return factor.value(x, config) * sigmoid(-x)

    return Factor(
        value=lambda x, config: factor.value(x, config) * sigmoid(x),
        slope=lambda x, config: sigmoid(x) * (factor.slope(x, config) + inner(x, config)),
        # sigmoid is at most 1, and |x| sigmoid(x) sigmoid(-x) at most 0.224.
        steepest=lambda size, config: np.full_like(size, 1.23),
        roundings=factor.roundings + half.roundings,
        argument=lambda x, config: np.abs(x),
        condition=half.condition,
        terms=lambda x, config: sigmoid(x) * (1 + np.abs(inner(x, config))) + 2 * TINY,
        vanishes=True,
    )


_erfc = np.vectorize(math.erfc, otypes=[float])


def _cdf(x: Array) -> Array:
    result: Array = 0.5 * _erfc(-x / math.sqrt(2))
    return result


def _density(x: Array) -> Array:
    result: Array = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return result


# The tail of the normal distribution is exp(-x^2 / 2) times a polynomial: of the tail's relative
# error, exp has EXP_UNITS, the polynomial 1.2 units by its degree and 8 by its evaluation, the
# division two; and what the argument loses is multiplied with it.
_GELU = Factor(
    value=lambda x, config: x * _cdf(x),
    slope=lambda x, config: _cdf(x) + x * _density(x),
    steepest=lambda size, config: np.full_like(size, 1.13),
    roundings=EXP_UNITS + GLU_ROUNDINGS + 12,
    argument=lambda x, config: np.minimum(x * x / 2, 90),
    condition=lambda x, config: np.abs(x) * (x * x / 2) * _cdf(-np.abs(x)),
    terms=lambda x, config: _cdf(x) + np.abs(x) * _density(x) + 2 * TINY,
    vanishes=True,
)
_RELU = Factor(
    value=lambda x, config: np.maximum(x, 0),
    slope=lambda x, config: np.where(x > 0, 1.0, 0.0),
    steepest=lambda size, config: np.ones_like(size),
    roundings=0,
)
_RELU2 = Factor(
    value=lambda x, config: np.maximum(x, 0) ** 2,
    slope=lambda x, config: 2 * np.maximum(x, 0),
    steepest=lambda size, config: 2 * size,
    roundings=1,
)
_ITSELF = Factor(
    value=lambda x, config: x,
    slope=_one,
    steepest=lambda size, config: np.ones_like(size),
    roundings=0,
)
_PLUS_ONE = dataclasses.replace(_ITSELF, value=lambda x, config: x + 1, roundings=1)
_SILU = sigmoid_times(lambda x, config: x, _one, 1.1)


@dataclasses.dataclass(frozen=True)
class Activation:
    """A function of gate times a function of up.

    ``source`` says where the formula stands: a paper, or a file of vLLM or transformers and the
    class in it. ``clamped_after``: the limit of gate holds for its function's value, not for gate.
    ``cases`` has the fields of `ktk.MoEConfig` that only this activation takes, with values for
    tests, once for each choice of fields.
    """

    gate: Factor
    up: Factor = _ITSELF
    source: str = dataclasses.field(kw_only=True)
    clamped_after: bool = False
    cases: tuple[dict[str, Any], ...] = ({},)


#: By the names of `ktk.MoEConfig`.
ACTIVATIONS = {
    "silu": Activation(_SILU, source="https://arxiv.org/abs/2002.05202: SwiGLU"),
    "swigluoai": Activation(
        sigmoid_times(
            lambda x, config: config.activation_alpha * x,
            lambda x, config: np.full_like(x, config.activation_alpha),
            1.1,  # for any alpha
        ),
        up=_PLUS_ONE,
        source="transformers/models/gpt_oss/modeling_gpt_oss.py: GptOssExperts._apply_gate",
    ),
    "gelu_tanh": Activation(
        sigmoid_times(
            lambda x, config: 2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3),
            lambda x, config: 2 * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * x**2),
            1.13,
        ),
        source="https://arxiv.org/abs/1606.08415: the tanh form of GELU",
    ),
    "gelu": Activation(_GELU, source="https://arxiv.org/abs/2002.05202: GEGLU"),
    "relu": Activation(_RELU, source="https://arxiv.org/abs/2002.05202: ReGLU"),
    "relu2": Activation(_RELU2, source="https://arxiv.org/abs/2109.08668: squared ReLU"),
    "swiglustep": Activation(
        _SILU,
        source="vllm/model_executor/layers/activation.py: SwigluStepAndMul",
        clamped_after=True,
    ),
    "situ": Activation(
        _times_sigmoid(_soft("gate_softcap")),
        up=_soft("up_softcap"),
        source="vllm/model_executor/layers/activation.py: SituAndMul",
        cases=({"gate_softcap": 7.0, "up_softcap": 3.5}, {"gate_softcap": 7.0}),
    ),
}

#: Options that every activation function is tested with.
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"activation_limit": 2.0},
    {"activation_limit": 1.5, "activation_alpha": 1.0, "clamp_gate_below": True},
)


def activation_of(config: MoEConfig) -> Activation:
    """Return the activation function of a layer."""
    try:
        return ACTIVATIONS[config.activation]
    except KeyError:
        name = config.activation
        raise ValueError(f"the reference does not know the activation {name!r}") from None


def clamp_gate(x: Array, config: MoEConfig) -> Array:
    """Clamp gate, or what the function of gate returns."""
    if config.activation_limit is None:
        return x
    low = -config.activation_limit if config.clamp_gate_below else None
    return np.clip(x, low, config.activation_limit)


def clamp_up(x: Array, config: MoEConfig) -> Array:
    """Clamp up."""
    limit = config.activation_limit
    return x if limit is None else np.clip(x, -limit, limit)


def of_gate(gate: Array, config: MoEConfig) -> Array:
    """Return the function of gate, with its clamp."""
    function = activation_of(config)
    if function.clamped_after:
        return clamp_gate(function.gate.value(gate, config), config)
    return function.gate.value(clamp_gate(gate, config), config)


def of_up(up: Array, config: MoEConfig) -> Array:
    """Return the function of up, with its clamp."""
    return activation_of(config).up.value(clamp_up(up, config), config)
