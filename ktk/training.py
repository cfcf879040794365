"""Gradients of layers whose weights lie packed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ktk import _core
from ktk.arrays import Array, empty_like, is_tensor, readable, writable
from ktk.config import MoEConfig
from ktk.layer import PackedLayer, inputs
from ktk.lora import FACTORS, Lora, given_adapters

if TYPE_CHECKING:
    import torch

_WEIGHTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


@dataclass(frozen=True, eq=False)
class WeightGradients:
    """Gradients of the weights of some experts, float32.

    Attributes
    ----------
    experts
        Whose they are.
    gate, up : array [len(experts), intermediate_size, hidden_size]
        Of gate None, and of its bias, where experts have none.
    down : array [len(experts), hidden_size, intermediate_size]
    gate_bias, up_bias : array [len(experts), intermediate_size]
    down_bias : array [len(experts), hidden_size]
    """

    experts: range
    gate: Array | None
    up: Array
    down: Array
    gate_bias: Array | None
    up_bias: Array
    down_bias: Array


@dataclass(frozen=True, eq=False)
class MoEGradients:
    """What `MoE.backward` returns.

    Attributes
    ----------
    hidden : array [tokens, hidden_size]
        Of the library and dtype of the hidden states.
    topk_weights : array [tokens, k]
        float32; zeros where an id names nothing that is computed. Of a zero expert, the product
        of a row of `hidden` and of `grad`.
    lora : Lora, optional
        Gradients of an adapter's factors, float32; its scale is the adapter's.
    weights : WeightGradients, optional
    """

    hidden: Array
    topk_weights: Array
    lora: Lora | None = None
    weights: WeightGradients | None = None


@functools.cache
def float_backend() -> _core.FloatBackend:
    """Return what gradients are multiplied with: ktk's own backend of bf16 weights."""
    from ktk.names import PREFERRED
    from ktk.registry import load_backend

    # By distribution: another package may provide a backend of this name, too.
    return _core.FloatBackend(load_backend(PREFERRED["bf16"][0], distribution="ktk").core)


class TrainableLayer(PackedLayer):
    """A layer of experts with a backward pass.

    Weights stay packed. A backward pass decodes them block by block and multiplies in bf16, with
    sums in f32: gradients are exact for the weights that are stored, but for this rounding. How
    activations are quantized for products of integers has no gradient and is taken as it is
    (straight-through).
    """

    def forward_train(
        self,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        lora: Lora | None = None,
        mask: Array | None = None,
        out: Array | None = None,
        save: bool = True,
    ) -> tuple[Array, torch.Tensor | None]:
        """Compute the layer, and keep what its backward pass needs.

        Parameters
        ----------
        hidden, topk_ids, topk_weights, mask, out
            As in a call. Gradients do not flow through this: `backward` computes them.
        lora : Lora, optional
            An adapter.
        save : bool
            Keep the products of gate and up, which a backward pass computes again otherwise: twice
            ``intermediate_size`` bf16 for each token and expert that it names, and twice an
            adapter's rank float32. The same bits of all gradients come out either way.

        Returns
        -------
        array [tokens, hidden_size]
        tensor [tokens, k, 2, intermediate_size], bf16, or None
            Products of gate, then of up, with what the adapter adds, without biases and routing
            weights. What no expert computes holds anything. Without a gate
            [tokens, k, 1, intermediate_size]. Of an expert whose down has its columns in an order,
            they are in that. With an adapter, rows are longer by twice its rank: behind each
            product is what goes into the factor B beside it, ``scale * x A^T`` in float32.
        """
        import numpy as np
        import torch

        result = empty_like(_plain(hidden)) if out is None else out
        adapters = _adapters(lora)
        kept = None
        if save:
            shape = kept_shape(self.config, _shape(topk_ids), 0 if lora is None else lora.rank)
            # numpy's large arrays have huge pages, torch's do not: experts write rows in no order,
            # and would look up a page for each.
            kept = torch.from_numpy(np.empty(shape, np.int16)).view(torch.bfloat16)
        _core.forward_with(
            self._core,
            *inputs(*map(_plain, (hidden, topk_ids, topk_weights, mask))),
            writable("out", result),
            adapters,
            None,
            readable("kept", kept),
        )
        return result, kept

    def backward(
        self,
        grad: Array,
        hidden: Array,
        topk_ids: Array,
        topk_weights: Array,
        *,
        saved: Array | None = None,
        lora: Lora | None = None,
        mask: Array | None = None,
        weight_grads: bool | range = False,
    ) -> MoEGradients:
        """Compute gradients of a call's inputs, of an adapter, and of weights.

        Parameters
        ----------
        grad : array [tokens, hidden_size]
            The gradient of the output: bf16, f16 or f32.
        hidden, topk_ids, topk_weights, lora, mask
            What `forward_train` was called with.
        saved : tensor, optional
            What `forward_train` returned beside its output; without it, the products are computed
            again.
        weight_grads : bool or range
            Also compute gradients of the weights and biases of all experts, or of a range of them.
            They are large: 4 bytes for each weight.

        Returns
        -------
        MoEGradients
            The same bits for any number of threads.

        Raises
        ------
        BackendError
            The backend of bf16 weights, which multiplies, is not there.
        RuntimeError
            An expert that is named was not loaded.
        TypeError, ValueError
            An array has another dtype or shape than the call means.
        """
        given = _adapters(lora)
        dx = empty_like(_plain(hidden))
        like = hidden if is_tensor(hidden) else None
        dw = _zeros(_shape(topk_weights), like)
        factors: dict[str, Array] = {}
        if lora is not None:
            factors = {name: _zeros(one.shape, like) for name, one in lora.factors()}
        experts = self._range(weight_grads)
        count, c = len(experts), self.config
        h, i = c.hidden_size, c.intermediate_size
        shapes = ((i, h), (i, h), (h, i), (i,), (i,), (h,))
        weights = [
            _zeros((count, *shape), like) if name.removesuffix("_bias") in c.parts else None
            for name, shape in zip(_WEIGHTS, shapes, strict=True)
            if count
        ]
        _core.backward(
            self._core,
            float_backend(),
            *inputs(*map(_plain, (hidden, topk_ids, topk_weights, mask))),
            _read("grad", grad),
            _read("saved", saved),
            given,
            readable("hidden_gradient", dx),
            readable("topk_weights_gradient", dw),
            [readable(name, factors.get(name)) for name in FACTORS],
            experts.start,
            count,
            [readable(name, one) for name, one in zip(_WEIGHTS, weights, strict=False)],
        )
        return MoEGradients(
            dx,
            dw,
            Lora(**factors, scale=lora.scale) if lora is not None else None,
            WeightGradients(experts, *weights) if count else None,
        )

    def _range(self, weight_grads: bool | range) -> range:
        experts = self.config.num_experts
        if isinstance(weight_grads, range):
            inside = 0 <= weight_grads.start <= weight_grads.stop <= experts
            if weight_grads.step != 1 or not inside:
                raise ValueError(
                    f"weight_grads must be a range of experts below {experts}, got {weight_grads}"
                )
            return weight_grads
        if not isinstance(weight_grads, bool):
            raise TypeError(
                f"weight_grads must be True, False or a range of experts, got {weight_grads!r}"
            )
        return range(experts if weight_grads else 0)


for _name in ("forward_train", "backward"):
    # torch.compile must run calls rather than trace them: what it traces with has no values.
    getattr(TrainableLayer, _name)._torchdynamo_disable = True


def kept_shape(config: MoEConfig, ids: Sequence[int], rank: int = 0) -> tuple[int, ...]:
    """Return the shape of what `forward_train` keeps for ids [tokens, k]: gate, if any, and up.

    Of an adapter's rank float32 follow each product, two elements of bf16 each.
    """
    return (*ids, len(config.parts) - 1, config.intermediate_size + 2 * rank)


def linear_backward(linear: Any, grad: Array, x_gradient: Array) -> Array:
    """Write the gradient of a dense layer's input, [..., in_features], and return it."""
    _core.linear_backward(
        linear._core, float_backend(), _read("grad", grad), writable("x_gradient", x_gradient)
    )
    return x_gradient


def _plain(array: Array) -> Array:
    """Return a tensor without its part in a graph."""
    return array.detach() if is_tensor(array) else array


def _read(name: str, array: Array | None) -> Array | None:
    return readable(name, _plain(array))


def _adapters(lora: Lora | None) -> list[Any]:
    if lora is None:
        return []
    if not isinstance(lora, Lora):
        raise TypeError(f"lora must be a ktk.Lora, got {lora!r}")
    plain = {name: _plain(array) for name, array in lora.factors()}
    return given_adapters(Lora(**plain, scale=lora.scale), None)


def _shape(array: Array) -> Sequence[int]:
    shape: Sequence[int] = tuple(getattr(array, "shape", ()))
    return shape if len(shape) == 2 else (0, 0)  # the core says what it wants


def _zeros(shape: Sequence[int], like: Array | None) -> Array:
    import numpy as np

    # Pages of the system that nobody has written: workers write them first, and in parallel.
    array = np.zeros(tuple(shape), np.float32)
    if like is None:
        return array
    import torch

    return torch.from_numpy(array)


__all__ = [
    "MoEGradients",
    "TrainableLayer",
    "WeightGradients",
    "float_backend",
    "kept_shape",
    "linear_backward",
]
