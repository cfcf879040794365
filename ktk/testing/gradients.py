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
from ktk.testing.bounds import Array
from ktk.testing.reference import Expert, Uncertain, exact, times


def bf16(x: Uncertain) -> Uncertain:
    """Round to bf16, or not: an implementation may keep more."""
    element = formats.ELEMENTS["bf16"]
    assert isinstance(element, formats.Float)
    return x.widened(element.rounding(x.size, up_to=True))


def returned(x: Uncertain, element: str) -> Uncertain:
    """Round sums of f32 once, to what a caller has."""
    kind = formats.ELEMENTS[element]
    assert isinstance(kind, formats.Float)
    return x if element == "f32" else x.widened(kind.nearest(x.size))


def product(a: Uncertain, b: Uncertain, extra: int = 0) -> Uncertain:
    """Multiply matrices ``a @ b`` with sums in f32, in any order."""
    error = a.error @ np.abs(b.value) + a.size @ b.error
    return Uncertain(a.value @ b.value, error + bounds.dot(a.size, b.size.T, extra))


def total(*parts: Uncertain) -> Uncertain:
    """Add up."""
    size = sum(part.size for part in parts)
    error = sum(part.error for part in parts) + bounds.gamma(len(parts)) * size
    return Uncertain(sum(part.value for part in parts), error)  # type: ignore[arg-type]


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
    factor: Array,
    weights: Expert,
    config: MoEConfig,
    acts: Sequence[formats.Format],
    slices: Sequence[int],
    factors: dict[str, Array],
    scale: float,
) -> tuple[list[Uncertain], Uncertain]:
    """Compute an expert with an adapter, for rows of hidden states times factors (rows, 1).

    Returns what is kept, the products of gate and up without factors and biases, and the output.
    """
    x = exact(hidden)
    products: dict[str, Uncertain] = {}
    for part, act in zip(config.parts[:-1], acts[-len(config.parts) : -1], strict=True):
        reach = weights.reach.get(part, 0.0)
        stored = reference.matmul(reference.encode(x, act), getattr(weights, part), reach=reach)
        products[part] = _sum(stored, low_rank(x, factors, part, scale))
    z = {
        part: _biased(times(one, exact(factor)), getattr(weights, f"{part}_bias"))
        for part, one in products.items()
    }
    glu = reference.bounded_glu(z.get("gate"), z["up"], config)
    h = reference.encode_slices(glu, acts[2], slices)
    down = reference.matmul(h, weights.down, len(slices), weights.reach.get("down", 0.0))
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
    kept : array [tokens, k, 2, intermediate_size or more]
        Products of gate and up, without factors and biases; without a gate, of up alone. What
        follows `intermediate_size` of them, as of an adapter, is not read.
    experts : sequence of Expert
        Weights as stored.
    """
    width = config.intermediate_size
    scale = 1.0 if lora is None else lora.scale
    nothing: Any = {"value": np.zeros_like(hidden), "error": np.zeros_like(hidden)}
    dx_value, dx_error, dx_size = (np.zeros_like(hidden) for _ in range(3))
    dw = Uncertain(np.zeros_like(topk_weights), np.zeros_like(topk_weights))
    result = Gradients(Uncertain(**nothing), dw, {}, {})
    # Sums of blocks, which are at least 32 deep.
    blocks = (config.hidden_size + config.intermediate_size) // 32 + 8
    for number, tokens, slots in reference.named(ids, config.num_experts, mask):
        weights, factors = experts[number], factors_of(lora, number)
        before, after = reference.factors_of(topk_weights[tokens, slots], config)
        factor, dy = exact(after), exact(grad[tokens])
        x = times(exact(hidden[tokens]), exact(before))
        products = {
            part: kept[tokens, slots, which, :width] for which, part in enumerate(config.parts[:-1])
        }
        z = {
            part: _weighed_sum(one, before, getattr(weights, f"{part}_bias"))
            for part, one in products.items()
        }
        gate, up = z.get("gate"), z["up"]
        h = reference.bounded_glu(None if gate is None else exact(gate), exact(up), config)
        dh = product(bf16(dy), bf16(exact(weights.down)), blocks)
        q: dict[str, Uncertain] = {}
        if "down_a" in factors:
            q["down"] = scaled(product(bf16(dy), bf16(exact(factors["down_b"]))), scale)
            dh = total(dh, product(bf16(q["down"]), bf16(exact(factors["down_a"]))))
            q["down"] = times(q["down"], factor)
        dz = {
            part: times(times(dh, factor), slope, 2)
            for part, slope in zip(z, slopes(gate, up, config), strict=True)
        }
        if config.apply_router_weight_on_input:
            dots = [_row_sums(times(one, exact(products[part]))) for part, one in dz.items()]
        else:
            dots = [_row_sums(times(dh, h))]
            if weights.down_bias is not None:
                dots.append(product(dy, exact(weights.down_bias[:, np.newaxis])))
        dot = total(*dots)
        dw.value[tokens, slots], dw.error[tokens, slots] = dot.value[:, 0], dot.error[:, 0]
        parts = []
        for part, one in dz.items():
            parts.append(product(bf16(one), bf16(exact(getattr(weights, part))), blocks))
            if f"{part}_a" in factors:
                q[part] = scaled(product(bf16(one), bf16(exact(factors[f"{part}_b"]))), scale)
                parts.append(product(bf16(q[part]), bf16(exact(factors[f"{part}_a"]))))
        dx = times(total(*parts), exact(before))
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
    tokens, slots = np.nonzero(reference.passed(ids, config))
    factor = exact(topk_weights[tokens, slots][:, np.newaxis])
    dx = times(exact(grad[tokens]), factor)
    np.add.at(dx_value, tokens, dx.value)
    np.add.at(dx_error, tokens, dx.error)
    np.add.at(dx_size, tokens, dx.size)
    dot = _row_sums(times(exact(grad[tokens]), exact(hidden[tokens])))
    dw.value[tokens, slots], dw.error[tokens, slots] = dot.value[:, 0], dot.error[:, 0]
    terms = bounds.gamma(ids.shape[1] + 1)
    result.hidden = Uncertain(dx_value, dx_error + terms * dx_size)
    return result


def _turned(x: Uncertain) -> Uncertain:
    return Uncertain(x.value.T, x.error.T)


def _row_sums(x: Uncertain) -> Uncertain:
    """Add up the values of each row, in any order and number of parts."""
    size, length = x.size.sum(1, keepdims=True), x.value.shape[1]
    error = x.error.sum(1, keepdims=True) + bounds.gamma(length + 32) * size
    return Uncertain(x.value.sum(1, keepdims=True), error)


def _weighed_sum(x: Array, factor: Array, bias: Array | None) -> Array:
    """Multiply and add a bias in f32, which numpy rounds as an implementation does."""
    found = x.astype(np.float32) * factor.astype(np.float32)
    return (found if bias is None else found + bias.astype(np.float32)).astype(np.float64)
