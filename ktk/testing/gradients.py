"""The backward pass of a layer in float64, and what a correct one may differ by.

Gradients start from the products of gate and up that the forward pass kept, so that what a backend
does to activations is not mixed up with what the backward pass loses: its operands are rounded to
bf16, its sums to f32, and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ktk.config import MoEConfig
from ktk.lora import Lora
from ktk.testing import activations, bounds, formats, reference
from ktk.testing.bounds import TINY, Array
from ktk.testing.reference import Expert, Uncertain


def exact(value: Array) -> Uncertain:
    """Return values that are known."""
    return Uncertain(value, np.zeros_like(value))


def bf16(x: Uncertain) -> Uncertain:
    """Round to bf16, or not: an implementation may keep more."""
    element = formats.ELEMENTS["bf16"]
    assert isinstance(element, formats.Float)
    return x.widened(element.rounding(x.size, up_to=True))


def product(a: Uncertain, b: Uncertain, extra: int = 0) -> Uncertain:
    """Multiply matrices ``a @ b`` with sums in f32, in any order."""
    error = a.error @ np.abs(b.value) + a.size @ b.error
    return Uncertain(a.value @ b.value, error + bounds.dot(a.size, b.size.T, extra))


def total(*parts: Uncertain) -> Uncertain:
    """Add up."""
    size = sum(part.size for part in parts)
    error = sum(part.error for part in parts) + bounds.gamma(len(parts)) * size
    return Uncertain(sum(part.value for part in parts), error)  # type: ignore[arg-type]


def times(a: Uncertain, b: Uncertain, roundings: int = 1) -> Uncertain:
    """Multiply element by element."""
    error = a.error * np.abs(b.value) + a.size * b.error
    value = a.value * b.value
    return Uncertain(value, error + bounds.gamma(roundings) * (np.abs(value) + error) + TINY)


def factors_of(lora: Lora | None, expert: int) -> dict[str, Array]:
    """Return the factors of one expert in float64."""
    found = {} if lora is None else dict(lora.factors())
    return {name: formats.as_float64(array)[expert] for name, array in found.items()}


def low_rank(x: Uncertain, factors: dict[str, Array], part: str, scale: float) -> Uncertain | None:
    """Compute ``scale * (x @ A.T) @ B.T``; None for a matrix without factors."""
    if f"{part}_a" not in factors:
        return None
    a, b = exact(factors[f"{part}_a"].T), exact(factors[f"{part}_b"].T)
    return product(scaled(product(x, a), scale), b)


def scaled(x: Uncertain, scale: float) -> Uncertain:
    """Multiply with a number of f32."""
    return times(x, exact(np.full((), float(np.float32(scale)))))


def _sum(*parts: Uncertain | None) -> Uncertain:
    return total(*(part for part in parts if part is not None))


def expert_with(
    hidden: Array,
    weights: Expert,
    config: MoEConfig,
    acts: Sequence[formats.Format],
    slices: Sequence[int],
    factors: dict[str, Array],
    scale: float,
) -> tuple[list[Uncertain], Uncertain]:
    """Compute gate and up, without biases, and the output of an expert with an adapter."""
    x = exact(hidden)
    products: dict[str, Uncertain] = {}
    for part, act in zip(config.parts[:-1], acts[-len(config.parts) : -1], strict=True):
        reach = weights.reach.get(part, 0.0)
        stored = reference.matmul(
            reference.encode(x, act), getattr(weights, part), None, reach=reach
        )
        products[part] = _sum(stored, low_rank(x, factors, part, scale))
    of_gate = products.get("gate")
    glu = reference.bounded_glu(
        None if of_gate is None else _biased(of_gate, weights.gate_bias),
        _biased(products["up"], weights.up_bias),
        config,
    )
    h = reference.encode_slices(glu, acts[2], slices)
    down = reference.matmul(h, weights.down, None, len(slices), weights.reach.get("down", 0.0))
    y = _sum(down, low_rank(h, factors, "down", scale))
    return list(products.values()), _biased(y, weights.down_bias)


def _biased(x: Uncertain, bias: Array | None) -> Uncertain:
    return x if bias is None else total(x, exact(np.broadcast_to(bias, x.value.shape)))


def slopes(gate: Array | None, up: Array, config: MoEConfig) -> list[Uncertain]:
    """Return derivatives of the activation function by gate and by up, 0 where a clamp holds.

    Without a gate, by up alone.
    """
    function = activations.activation_of(config)
    after = function.clamped_after
    first = up if gate is None else gate
    g = first if after else activations.clamp_gate(first, config)
    held_from = function.gate.value(g, config) if after else first
    held_g = activations.clamp_gate(held_from, config) != held_from
    slope_g = Uncertain(function.gate.slope(g, config), function.gate.slope_error(g, config))
    if gate is None:
        return [_where_free(held_g, slope_g)]
    u = activations.clamp_up(up, config)
    slope_u = Uncertain(function.up.slope(u, config), function.up.slope_error(u, config))
    f = Uncertain(activations.of_gate(gate, config), function.gate.own_error(g, config))
    other = Uncertain(function.up.value(u, config), function.up.own_error(u, config))
    return [_where_free(held_g, times(slope_g, other)), _where_free(u != up, times(f, slope_u))]


def _where_free(held: npt.NDArray[np.bool_], slope: Uncertain) -> Uncertain:
    return Uncertain(np.where(held, 0, slope.value), np.where(held, 0, slope.error))


@dataclasses.dataclass
class Gradients:
    """Gradients of a layer, with their bounds; those of factors and weights by expert."""

    hidden: Uncertain
    topk_weights: Uncertain
    factors: dict[int, dict[str, Uncertain]]
    weights: dict[int, dict[str, Uncertain]]


def bounded_backward(
    grad: Array,
    hidden: Array,
    ids: reference.Ids,
    topk_weights: Array,
    kept: Array,
    experts: Sequence[Expert],
    config: MoEConfig,
    lora: Lora | None = None,
    mask: npt.NDArray[np.bool_] | None = None,
) -> Gradients:
    """Compute the backward pass of a layer, with bounds for an implementation as above.

    Parameters
    ----------
    grad, hidden : array [tokens, hidden_size]
    ids, topk_weights : array [tokens, k]
    kept : array [tokens, k, 2, intermediate_size]
        Products of gate and up, without biases; without a gate, of up alone.
    experts : sequence of Expert
        Weights as stored.
    """
    scale = 1.0 if lora is None else lora.scale
    nothing: Any = {"value": np.zeros_like(hidden), "error": np.zeros_like(hidden)}
    dx_value, dx_error, dx_size = (np.zeros_like(hidden) for _ in range(3))
    dw = Uncertain(np.zeros_like(topk_weights), np.zeros_like(topk_weights))
    result = Gradients(Uncertain(**nothing), dw, {}, {})
    # Sums of blocks, which are at least 32 deep.
    blocks = (config.hidden_size + config.intermediate_size) // 32 + 8
    for number, tokens, slots in reference.named(ids, config.num_experts, mask):
        weights, factors = experts[number], factors_of(lora, number)
        x, dy = exact(hidden[tokens]), exact(grad[tokens])
        factor = exact(topk_weights[tokens, slots][:, np.newaxis])
        z = {
            part: _one_sum(kept[tokens, slots, which], getattr(weights, f"{part}_bias"))
            for which, part in enumerate(config.parts[:-1])
        }
        gate, up = z.get("gate"), z["up"]
        h = reference.bounded_glu(None if gate is None else exact(gate), exact(up), config)
        dh = product(bf16(dy), bf16(exact(weights.down)), blocks)
        q: dict[str, Uncertain] = {}
        if "down_a" in factors:
            q["down"] = scaled(product(dy, exact(factors["down_b"])), scale)
            dh = total(dh, product(q["down"], exact(factors["down_a"])))
            q["down"] = times(q["down"], factor)
        dots = times(dh, h)
        length = up.shape[1]
        dot_value, dot_size = dots.value.sum(1), dots.size.sum(1)
        dot_error = dots.error.sum(1) + bounds.gamma(length + 32) * dot_size
        if weights.down_bias is not None:
            more = product(dy, exact(weights.down_bias[:, np.newaxis]))
            dot_value, dot_size = dot_value + more.value[:, 0], dot_size + more.size[:, 0]
            dot_error = dot_error + more.error[:, 0] + bounds.gamma(2) * dot_size
        dw.value[tokens, slots], dw.error[tokens, slots] = dot_value, dot_error
        dz = {
            part: times(times(dh, factor), slope, 2)
            for part, slope in zip(z, slopes(gate, up, config), strict=True)
        }
        parts = []
        for part, one in dz.items():
            parts.append(product(bf16(one), bf16(exact(getattr(weights, part))), blocks))
            if f"{part}_a" in factors:
                q[part] = scaled(product(one, exact(factors[f"{part}_b"])), scale)
                parts.append(product(q[part], exact(factors[f"{part}_a"])))
        dx = total(*parts)
        np.add.at(dx_value, tokens, dx.value)
        np.add.at(dx_error, tokens, dx.error)
        np.add.at(dx_size, tokens, dx.size)
        weighted = times(dy, factor)
        result.weights[number] = {
            **{part: product(_turned(one), x) for part, one in dz.items()},
            "down": product(_turned(weighted), h),
        } | {
            f"{part}_bias": product(_turned(one), exact(np.ones((len(tokens), 1))))
            for part, one in (*dz.items(), ("down", weighted))
        }
        result.factors[number] = {}
        inputs = {"gate": x, "up": x, "down": h}
        outputs = {**dz, "down": weighted}
        for part, low in q.items():
            p = scaled(product(inputs[part], exact(factors[f"{part}_a"].T)), scale)
            result.factors[number] |= {
                f"{part}_a": product(_turned(low), inputs[part]),
                f"{part}_b": product(_turned(outputs[part]), p),
            }
    terms = bounds.gamma(ids.shape[1] + 1)
    result.hidden = Uncertain(dx_value, dx_error + terms * dx_size)
    return result


def _turned(x: Uncertain) -> Uncertain:
    return Uncertain(x.value.T, x.error.T)


def _one_sum(x: Array, bias: Array | None) -> Array:
    """Add a bias in f32, which numpy rounds as an implementation does."""
    if bias is None:
        return x
    return (x.astype(np.float32) + bias.astype(np.float32)).astype(np.float64)
