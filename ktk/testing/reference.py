"""The experts of a layer in float64: what they are, and what a correct layer may differ by.

`layer` is the definition, and the only one in Python. `bounded_layer` follows an implementation
through the same steps: every one turns uncertain values (a value and a bound of its error) into the
next ones. Activations are encoded, multiplied with the stored weights, go through the activation
function, are encoded again, multiplied, weighted and added, and rounded to the type of the output.
Worst cases add up, so the bound holds for any distribution of values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ktk.config import MoEConfig
from ktk.testing import activations, bounds, formats
from ktk.testing.bounds import TINY, UNIT, Array

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def glu(gate: Array | None, up: Array, config: MoEConfig) -> Array:
    """Return the input of the down projection; without a gate, the function is that of up."""
    if gate is None:
        return activations.of_gate(up, config)
    return activations.of_gate(gate, config) * activations.of_up(up, config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expert:
    """Weights as they are stored, in float64: gate, if any, and up (I, H), down (H, I), and biases.

    ``reach`` has, for gate, up and down, what `bounds.dot` calls so; 0 where there is no entry.
    """

    gate: Array | None = None
    up: Array
    down: Array
    gate_bias: Array | None = None
    up_bias: Array | None = None
    down_bias: Array | None = None
    reach: Mapping[str, Array | float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, arrays: Mapping[str, Any]) -> Expert:
        """Make one of arrays of any library and type, by the names of the fields."""
        given: dict[str, Any] = {
            name: formats.as_float64(array) for name, array in arrays.items() if array is not None
        }
        return cls(**given)


def expert(hidden: Array, weights: Expert, config: MoEConfig) -> Array:
    """Compute one expert for rows of hidden states."""
    gate = None
    if weights.gate is not None:
        gate = _linear(hidden, weights.gate, weights.gate_bias)
    up = _linear(hidden, weights.up, weights.up_bias)
    return _linear(glu(gate, up, config), weights.down, weights.down_bias)


def _linear(x: Array, weight: Array, bias: Array | None) -> Array:
    product: Array = x @ weight.T
    return product if bias is None else product + bias


def named(ids: Ids, experts: int, mask: Mask | None = None) -> Iterator[tuple[int, Ids, Ids]]:
    """Yield each expert that computes something, with the tokens that name it and their slots.

    Ids outside the range of experts contribute nothing, nor do experts whose mask is True.
    """
    for number in np.unique(ids).tolist():
        if 0 <= number < experts and not (mask is not None and mask[number]):
            yield number, *np.nonzero(ids == number)


def passed(ids: Ids, config: MoEConfig) -> Mask:
    """Return which entries name a zero expert, which returns what goes in; no mask has these."""
    found: Mask = (ids >= config.num_experts) & (ids < config.num_ids)
    return found


def factors_of(weights: Array, config: MoEConfig) -> tuple[Array, Array]:
    """Return what routing weights multiply rows with: before an expert, and after it."""
    rows = weights[:, np.newaxis]
    one = np.ones_like(rows)
    return (rows, one) if config.apply_router_weight_on_input else (one, rows)


def layer(
    hidden: Any,
    ids: Any,
    topk_weights: Any,
    expert_of: Callable[[int], Expert],
    config: MoEConfig,
) -> Array:
    """Compute the routed experts of a layer.

    Parameters
    ----------
    hidden : array of shape (tokens, hidden_size)
        Of any library and type of floats; so are the weights.
    ids : array of shape (tokens, top_k)
    topk_weights : array of shape (tokens, top_k)
    expert_of : callable
        Returns an expert by its number; is called once for each that a token names.
    config : MoEConfig

    Returns
    -------
    array of shape (tokens, hidden_size)
    """
    x = formats.as_float64(hidden)
    result = np.zeros_like(x)
    for number, tokens, slots in named(np.asarray(ids), config.num_experts):
        before, after = factors_of(formats.as_float64(topk_weights)[tokens, slots], config)
        y = expert(before * x[tokens], expert_of(number), config)
        np.add.at(result, tokens, after * y)
    tokens, slots = np.nonzero(passed(np.asarray(ids), config))
    before, after = factors_of(formats.as_float64(topk_weights)[tokens, slots], config)
    np.add.at(result, tokens, after * (before * x[tokens]))
    return result


# --- with bounds --------------------------------------------------------------------------------


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
    parts: int = 1,
    reach: Array | float = 0.0,
) -> Uncertain:
    """Multiply by stored weights, in so many parts of the depth."""
    error = x.error @ np.abs(weight).T + bounds.dot(x.size, weight, parts, reach)
    return Uncertain(x.value @ weight.T, error)


def biased(x: Uncertain, bias: Array | None) -> Uncertain:
    """Add a bias, if there is one."""
    if bias is None:
        return x
    value = x.value + bias
    return Uncertain(value, x.error * (1 + UNIT) + UNIT * (np.abs(value) + x.error))


def times(a: Uncertain, b: Uncertain, roundings: int = 1) -> Uncertain:
    """Multiply element by element."""
    error = a.error * np.abs(b.value) + a.size * b.error
    value = a.value * b.value
    return Uncertain(value, error + bounds.gamma(roundings) * (np.abs(value) + error) + TINY)


def exact(value: Array) -> Uncertain:
    """Return values that are known."""
    return Uncertain(value, np.zeros_like(value))


def bounded_activation(x: Uncertain, config: MoEConfig) -> Uncertain:
    """Apply the function of gate. Clamping never makes an error larger."""
    function = activations.activation_of(config)
    value = x.value if function.clamped_after else activations.clamp_gate(x.value, config)
    error = function.gate.steepest(np.abs(value) + x.error, config) * x.error
    error = error + function.gate.own_error(value, config)
    return Uncertain(activations.of_gate(x.value, config), error)


def bounded_glu(gate: Uncertain | None, up: Uncertain, config: MoEConfig) -> Uncertain:
    """Apply the activation function; without a gate, its function of gate is that of up."""
    if gate is None:
        return bounded_activation(up, config)
    function = activations.activation_of(config)
    u = activations.clamp_up(up.value, config)
    of_gate = bounded_activation(gate, config)
    gated, gated_error = of_gate.value, of_gate.error
    other = function.up.value(u, config)
    up_error = up.error + function.up.own_error(u, config)
    error = gated_error * (np.abs(other) + up_error) + np.abs(gated) * up_error
    error = error * (1 + UNIT) + UNIT * np.abs(gated * other) + TINY
    return Uncertain(gated * other, error)


def bounded_expert(
    hidden: Array,
    factor: Array,
    weights: Expert,
    config: MoEConfig,
    acts: tuple[formats.Format, formats.Format, formats.Format],
    slices: Sequence[int],
) -> Uncertain:
    """Compute one expert for rows of hidden states times factors (rows, 1)."""

    def product(part: str, x: Uncertain, parts: int = 1) -> Uncertain:
        return matmul(x, getattr(weights, part), parts, weights.reach.get(part, 0.0))

    def of_hidden(part: str, act: formats.Format) -> Uncertain:
        found = product(part, encode(exact(hidden), act))
        if config.apply_router_weight_on_input:
            found = times(found, exact(factor))
        return biased(found, getattr(weights, f"{part}_bias"))

    gate = None if weights.gate is None else of_hidden("gate", acts[0])
    glued = bounded_glu(gate, of_hidden("up", acts[1]), config)
    h = encode_slices(glued, acts[2], slices)
    return biased(product("down", h, len(slices)), weights.down_bias)


def bounded_layer(
    hidden: Array,
    ids: Ids,
    topk_weights: Array,
    experts: Sequence[Expert],
    config: MoEConfig,
    acts: tuple[formats.Format, formats.Format, formats.Format],
    slices: Sequence[int],
    *,
    mask: Mask | None = None,
    out: str = "f32",
) -> Uncertain:
    """Compute the routed experts of a layer, with bounds for an implementation in float32.

    Parameters
    ----------
    hidden : array of shape (tokens, hidden_size)
    ids : array of shape (tokens, top_k)
        Ids outside the range of experts and zero experts contribute nothing.
    topk_weights : array of shape (tokens, top_k)
    experts : sequence of Expert
        Weights as stored.
    config : MoEConfig
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
        for number, tokens, slots in named(ids, config.num_experts, mask):
            before, after = factors_of(topk_weights[tokens, slots], config)
            y = bounded_expert(hidden[tokens], before, experts[number], config, acts, slices)
            np.add.at(value, tokens, after * y.value)
            np.add.at(error, tokens, np.abs(after) * y.error)
            np.add.at(size, tokens, np.abs(after) * y.size)
        # Of zero experts nothing is encoded.
        tokens, slots = np.nonzero(passed(ids, config))
        terms_of_them = topk_weights[tokens, slots][:, np.newaxis] * hidden[tokens]
        np.add.at(value, tokens, terms_of_them)
        np.add.at(size, tokens, np.abs(terms_of_them))
        # One product and one sum for each slot and slice.
        terms = (ids.shape[1] + 1) * (len(slices) + 1)
        error += bounds.gamma(terms) * size + terms * TINY * (size > 0)
        total = Uncertain(value, np.where(size < bounds.LARGEST / 2, error, np.inf))
        element = formats.ELEMENTS[out]
        assert isinstance(element, formats.Float)
        return total.widened(element.rounding(total.size, up_to=True))
