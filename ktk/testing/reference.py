"""The experts of a layer in float64, with a bound for what a correct layer may differ.

Every step of the pipeline turns an uncertain value (a value and a bound of its error) into the
next one: activations are encoded, multiplied with the stored weights, go through the activation
function, are encoded again, multiplied, weighted and added, and rounded to the type of the output.
Worst cases add up, so the bound holds for any distribution of values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ktk.testing import bounds, formats
from ktk.testing.bounds import TINY, UNIT, Array

#: What an implementation of exp may lose, in units of UNIT: four units in the last place.
EXP_UNITS = 8
#: Roundings of an activation function outside exp: add, divide, two products, one sum.
GLU_ROUNDINGS = 5
#: Roundings of sigmoid's argument: the cubic of GELU, its constants included, has the most.
ARGUMENT_ROUNDINGS = 8
#: Upper bounds of |d/dg| of g * sigmoid(a * g) for any a, and of gelu_tanh.
LIPSCHITZ = {"silu": 1.1, "swigluoai": 1.1, "gelu_tanh": 1.13}


@dataclasses.dataclass(frozen=True)
class Uncertain:
    """Values that are known up to an error."""

    value: Array
    error: Array

    @property
    def size(self) -> Array:
        """Upper bound of the magnitude."""
        return np.abs(self.value) + self.error

    def widened(self, error: Array | float) -> Uncertain:
        """Return the same values with some more error."""
        return Uncertain(self.value, self.error + error)


@dataclasses.dataclass(frozen=True)
class Expert:
    """Weights as they are stored, in float64: gate and up (I, H), down (H, I), and biases.

    ``reach`` has, for gate, up and down, what `bounds.dot` calls so.
    """

    gate: Array
    up: Array
    down: Array
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None
    reach: tuple[Array | float, Array | float, Array | float] = (0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Activation:
    """The activation function of a layer; fields as in ``ktk.MoEConfig``."""

    activation: str = "silu"
    activation_limit: float | None = None
    activation_alpha: float = 1.702
    clamp_gate_below: bool = False


def encode(x: Uncertain, act: formats.Format) -> Uncertain:
    """Store activations."""
    return x.widened(formats.codec_bound(act, x.size, up_to=True))


def encode_slices(x: Uncertain, act: formats.Format, slices: Sequence[int]) -> Uncertain:
    """Store activations in slices of these widths, with groups of their own."""
    ends = np.cumsum(slices)[:-1]
    pairs = zip(np.split(x.value, ends, 1), np.split(x.error, ends, 1), strict=True)
    stored = [encode(Uncertain(value, error), act) for value, error in pairs]
    return Uncertain(x.value, np.concatenate([part.error for part in stored], 1))


def matmul(
    x: Uncertain,
    weight: Array,
    bias: Array | None,
    parts: int = 1,
    reach: Array | float = 0.0,
) -> Uncertain:
    """Multiply by stored weights, in so many parts of the depth, and add a bias."""
    value = x.value @ weight.T
    error = x.error @ np.abs(weight).T + bounds.dot(x.size, weight, parts, reach)
    if bias is not None:
        value = value + bias
        error = error * (1 + UNIT) + UNIT * (np.abs(value) + error)
    return Uncertain(value, error)


def _sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0, -x))


def glu(gate: Uncertain, up: Uncertain, config: Activation) -> Uncertain:
    """Apply the activation function. Clamping never makes an error larger."""
    g, u = gate.value, up.value
    if config.activation_limit is not None:
        limit = config.activation_limit
        g = np.clip(g, -limit if config.clamp_gate_below else None, limit)
        u = np.clip(u, -limit, limit)
    if config.activation == "gelu_tanh":
        argument = 2 * np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)
    elif config.activation == "swigluoai":
        argument = config.activation_alpha * g
        u = u + 1
    elif config.activation == "silu":
        argument = g
    else:
        raise ValueError(f"the reference does not know the activation {config.activation!r}")
    gated = g * _sigmoid(argument)

    # The function itself in float32. Its argument is off by some units, which matters where
    # sigmoid is steep; far out on the left it may be cut off to zero.
    slope = np.abs(g * argument) * _sigmoid(argument) * _sigmoid(-argument)
    own = (
        bounds.gamma(EXP_UNITS + GLU_ROUNDINGS) * np.abs(gated)
        + bounds.gamma(ARGUMENT_ROUNDINGS) * 1.001 * slope
        + 2 * TINY * (1 + np.abs(g))
    )
    gated_error = LIPSCHITZ[config.activation] * gate.error + own
    up_error = up.error + UNIT * np.abs(u)
    error = gated_error * (np.abs(u) + up_error) + np.abs(gated) * up_error
    error = error * (1 + UNIT) + UNIT * np.abs(gated * u) + TINY
    return Uncertain(gated * u, error)


def expert(
    hidden: Array,
    weights: Expert,
    config: Activation,
    acts: tuple[formats.Format, formats.Format, formats.Format],
    slices: Sequence[int],
) -> Uncertain:
    """Compute one expert for rows of hidden states."""
    reach = weights.reach
    exact = Uncertain(hidden, np.zeros_like(hidden))
    gate = matmul(encode(exact, acts[0]), weights.gate, weights.gate_bias, reach=reach[0])
    up = matmul(encode(exact, acts[1]), weights.up, weights.up_bias, reach=reach[1])
    h = encode_slices(glu(gate, up, config), acts[2], slices)
    return matmul(h, weights.down, weights.down_bias, len(slices), reach[2])


def layer(
    hidden: Array,
    ids: npt.NDArray[np.int64],
    topk_weights: Array,
    experts: Sequence[Expert],
    config: Activation,
    acts: tuple[formats.Format, formats.Format, formats.Format],
    slices: Sequence[int],
    *,
    mask: npt.NDArray[np.bool_] | None = None,
    out: str = "f32",
) -> Uncertain:
    """Compute the routed experts of a layer.

    Parameters
    ----------
    hidden : array of shape (tokens, hidden_size)
    ids : array of shape (tokens, top_k)
        Ids outside the range of experts contribute nothing.
    topk_weights : array of shape (tokens, top_k)
    experts : sequence of Expert
        Weights as stored.
    config : Activation
    acts : tuple of three Format
        How the activations of gate, up and down are stored.
    slices : sequence of int
        Widths of the parts that the intermediate dimension is cut into: its activations are
        stored for each, and their products are added.
    mask : array of shape (experts,), optional
        True for experts to skip.
    out : str
        Element type of the output.

    Returns
    -------
    Uncertain
    """
    value = np.zeros_like(hidden)
    error = np.zeros_like(hidden)
    size = np.zeros_like(hidden)
    with np.errstate(all="ignore"):
        for number, weights in enumerate(experts):
            if mask is not None and mask[number]:
                continue
            tokens, slots = np.nonzero(ids == number)
            if len(tokens) == 0:
                continue
            rows, at = np.unique(tokens, return_inverse=True)
            y = expert(hidden[rows], weights, config, acts, slices)
            factor = topk_weights[tokens, slots][:, np.newaxis]
            np.add.at(value, tokens, factor * y.value[at])
            np.add.at(error, tokens, np.abs(factor) * y.error[at])
            np.add.at(size, tokens, np.abs(factor) * y.size[at])
        # One product and one sum for each slot and slice.
        terms = (ids.shape[1] + 1) * (len(slices) + 1)
        error += bounds.gamma(terms) * size + terms * TINY * (size > 0)
        total = Uncertain(value, np.where(size < bounds.LARGEST / 2, error, np.inf))
        element = formats.ELEMENTS[out]
        assert isinstance(element, formats.Float)
        return total.widened(element.rounding(total.size, up_to=True))
