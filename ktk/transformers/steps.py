"""Attention of one token in one call, where a module of a model takes some forty.

What a module computes is found by asking it: it is called with one token and a small cache, what it
hands to the function of attention has to have the bits that ktk has, and what it makes of the
answer has to be the last product. Whatever else a call wants is left to the module.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]
from transformers.cache_utils import DynamicCache, DynamicLayer

from ktk import _core
from ktk.hosts.plain import is_constant, is_plain
from ktk.transformers import attention
from ktk.transformers.bare import are_bare
from ktk.transformers.dense import KtkLinear
from ktk.transformers.norms import FastNorm
from ktk.transformers.room import Room, room_of
from ktk.transformers.swap import add_to_class
from ktk.transformers.unchanged import Unchanged

#: Of dense layers, and of norms, which a module need not have.
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
NORMS = ("q_norm", "k_norm")
# Arguments that say nothing about attention; others have to be None or False.
_SILENT = frozenset({"position_ids", "use_cache", "cache_position", "logits_to_keep"})
# Options of the function of attention that change nothing for one token, or that are looked at.
_KNOWN = _SILENT | {"dropout", "scaling", "is_causal"}
# Tokens before the one that a module is asked about, and how large that is: some models clamp.
_BEFORE, _SIZES = 3, (1.0, 2.0**10)
_Pair = tuple[torch.Tensor, torch.Tensor]


def _silent(options: dict[str, Any]) -> bool:
    return all(name in _SILENT or _is_nothing(value) for name, value in options.items())


def _is_nothing(value: Any) -> bool:
    return value is None or value is False


class FastAttention:
    """What is added to a class of attention."""

    ktk_step: Step

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the class would, of one token by ktk."""
        if not args and is_plain(hidden_states):
            out = self.ktk_step(self, hidden_states, **kwargs)
            if out is not None:
                return out, None
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


class Call(NamedTuple):
    """What a step is called with beside its input.

    Attributes
    ----------
    layer
        Of a cache; None if it need not be told.
    room : Room
        Memory with what the layer holds.
    given : tensors or Nones
        Cosine, sine, weights of the norms of queries and keys.
    """

    layer: Any
    room: Room
    given: tuple[torch.Tensor | None, ...]

    def arguments(self) -> tuple[Any, ...]:
        """Return them as `_core` takes them, once."""
        tensors = (*self.given, self.room.keys, self.room.values)
        return (*(None if one is None else to_dlpack(one) for one in tensors), self.room.filled)


class Step:
    """The attention of a module, with its dense layers. Copies are the same object.

    Parameters
    ----------
    module
        Of a model.
    scaling
        Of scores.
    turns
        Whether queries and keys are given their positions by a rotary embedding.
    """

    def __init__(self, module: Any, scaling: float, turns: bool) -> None:
        self.layers = tuple(getattr(module, name).layer for name in LAYERS)
        self.norms = tuple(name for name in NORMS if hasattr(module, name))
        self.turns = turns
        kinds: Any = [getattr(module, one).ktk_norm if one in self.norms else None for one in NORMS]
        q, k, v, out = (layer.linear for layer in self.layers)
        depth = int(module.head_dim)
        self.shape = (k.out_features // depth, depth)
        self.out_width = out.out_features
        heads = q.out_features // depth
        self.core = _core.AttentionStep(
            q._core, k._core, v._core, out._core, heads, self.shape[0], depth, scaling, *kinds
        )

    def __call__(
        self,
        module: Any,
        x: torch.Tensor,
        position_embeddings: _Pair | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor | None:
        """Return what attention returns; None where that is not for ktk to compute."""
        call = self.prepare(
            module, x, position_embeddings, attention_mask, past_key_values, **kwargs
        )
        if call is None:
            return None
        out = x.new_empty((1, 1, self.out_width))
        forward: Any = self.core.forward
        forward(to_dlpack(x.detach()), *call.arguments(), to_dlpack(out), True)
        call.room.show(call.layer)
        return out

    def prepare(
        self,
        module: Any,
        x: torch.Tensor,
        position_embeddings: _Pair | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Call | None:
        """Return what ktk is called with beside `x`; None where that is not for ktk to compute."""
        norms = self.constants(module, x.dtype)
        if norms is None:
            return None
        given = position_embeddings, attention_mask, past_key_values
        return self.prepared(norms, module.layer_idx, x, *given, **kwargs)

    def constants(self, module: Any, dtype: torch.dtype) -> Any:
        """Return weights of norms or Nones; None where a module is not as it was, or computes more.

        `watch` says what this looks at.
        """
        if module.training or attention.implementation(module.config) != attention.WRAPPED:
            return None
        return self._norms(module, dtype)

    def watch(self, module: Any, seen: Unchanged) -> None:
        """Add what `constants` looks at."""
        found = module._modules
        seen.add(module, "training", "config", "layer_idx")
        seen.add(module.config, attention.NAME_IN_CONFIG)
        seen.add_children(module, *LAYERS, *self.norms)
        seen.add_bare(module, *(found[name] for name in (*LAYERS, *self.norms)))
        for name in LAYERS:
            seen.add(found[name], "layer")
        for name in self.norms:
            seen.add_weights(found[name], "weight")

    def prepared(
        self,
        norms: Any,
        number: int,
        x: torch.Tensor,
        position_embeddings: _Pair | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Call | None:
        """Return what `prepare` does, of `constants` and the number of a layer in caches."""
        if (
            attention_mask is not None
            or x.shape[:-1] != (1, 1)
            or not (kwargs.keys() <= _SILENT or _silent(kwargs))
        ):
            return None
        layer = self._layer(number, past_key_values, x.dtype)
        turn = self._turn(position_embeddings)
        if layer is None or turn is None:
            return None
        return Call(layer, room_of(layer), (*turn, *norms))

    def fits(self, module: Any) -> bool:
        """Tell whether a module still has the layers that this was made of."""
        found = module._modules
        return all(
            type(found[name]) is KtkLinear and found[name].layer is layer
            for name, layer in zip(LAYERS, self.layers, strict=True)
        )

    def attend(self, module: Any, x: torch.Tensor, turn: _Pair | None, room: Any) -> torch.Tensor:
        """Return what the last layer would multiply, and write a row behind what is filled."""
        out = x.new_empty((1, 1, self.layers[3].linear.in_features))
        norms = self._norms(module, x.dtype)
        if norms is None:
            raise ValueError("the norms of this module are not what they were")
        call = Call(None, room, (*(turn if self.turns and turn else (None, None)), *norms))
        forward: Any = self.core.forward
        forward(to_dlpack(x.detach()), *call.arguments(), to_dlpack(out), False)
        return out

    def _layer(self, number: int, cache: Any, dtype: torch.dtype) -> Any:
        """Return the layer of a cache that holds what this one appends to."""
        if type(cache) is not DynamicCache or cache.offloading or number >= len(cache.layers):
            return None
        layer: Any = cache.layers[number]
        if type(layer) is not DynamicLayer or not layer.is_initialized:
            return None
        heads, depth = self.shape
        one: Any
        for one in layer.keys, layer.values:
            if type(one) is not torch.Tensor or not is_constant(one, dtype):
                return None
            shape = one.shape
            if len(shape) != 4 or (shape[0], shape[1], shape[3]) != (1, heads, depth):
                return None
        return layer

    def _norms(self, module: Any, dtype: torch.dtype) -> Any:
        """Return weights of norms; None where something is not as it was."""
        found = module._modules
        norms = [found[name] for name in self.norms]
        if not self.fits(module) or not are_bare((*(found[name] for name in LAYERS), *norms)):
            return None
        weights: dict[str, torch.Tensor | None] = dict.fromkeys(NORMS)
        for name, one in zip(self.norms, norms, strict=True):
            if not isinstance(one, FastNorm):
                return None
            weight = one._parameters["weight"]  # type: ignore[attr-defined]
            if not is_constant(weight, dtype):
                return None
            weights[name] = weight.detach()
        return tuple(weights.values())

    def _turn(self, given: _Pair | None) -> Any:
        """Return cosine and sine, each a row, or Nones; None where they are something else."""
        if not self.turns:
            return None, None
        if given is None:
            return None
        cosine, sine = given
        if cosine.shape[:-1] != (1, 1) or not is_plain(cosine) or not is_plain(sine):
            return None
        return cosine.view(-1), sine.view(-1)

    def __copy__(self) -> Step:
        return self

    def __deepcopy__(self, memo: Any) -> Step:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a step of attention cannot be pickled: its weights lie packed in the memory of this "
            "process. Load the model in each process from its files"
        )


def speed_up_attention(model: nn.Module) -> None:
    """Let ktk compute steps of one token of the attention of a model, where it has the layers."""
    for module in model.modules():
        if isinstance(module, FastAttention) and module.ktk_step.fits(module):
            continue
        step = step_of(module)
        if step is None:
            continue
        add_to_class(module, FastAttention)
        setattr(module, "ktk_step", step)  # noqa: B010


def step_of(module: Any) -> Step | None:
    """Return what computes a step of a module; None if it is no attention that ktk has."""
    depth = getattr(module, "head_dim", None)
    if (
        not all(isinstance(getattr(module, name, None), KtkLinear) for name in LAYERS)
        or not all(
            isinstance(getattr(module, name, None), (FastNorm, type(None))) for name in NORMS
        )
        or not isinstance(getattr(module, "layer_idx", None), int)
        or not isinstance(depth, int)
    ):
        return None
    with torch.no_grad(), torch.device("cpu"):
        for turned in (depth, depth // 2):
            for turns in (True, False):
                try:
                    steps = [_asked(module, turned, turns, size) for size in _SIZES]
                except Exception:
                    continue  # of a class that wants something else, or layers that do not fit
                if None not in steps:
                    return steps[0]
    return None


def _asked(module: Any, turned: int, turns: bool, size: float) -> Step | None:
    """Return a step if it gives what the module does, with rotary embeddings of some size."""
    linears = [getattr(module, name).layer.linear for name in LAYERS]
    dtype, depth = module.q_proj.weight.dtype, module.head_dim
    queries, shared = (one.out_features // depth for one in linears[:2])
    generator = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)

    x = size * random(1, 1, linears[0].in_features)
    turn = random(1, 1, turned), random(1, 1, turned)
    past = random(1, shared, _BEFORE, depth), random(1, shared, _BEFORE, depth)
    answer = random(1, 1, queries, depth)
    given: list[Any] = []

    def take(*call: Any) -> tuple[torch.Tensor, None]:
        given.append(call)
        return answer, None

    cache = DynamicCache()
    cache.update(*past, module.layer_idx)
    setattr(module, attention.ASKED, take)
    try:
        result = module.forward(
            hidden_states=x,
            position_embeddings=turn,
            attention_mask=None,
            past_key_values=cache,
        )
    finally:
        delattr(module, attention.ASKED)
    ((query, key, value, mask, options),) = given
    known = all(name in _KNOWN or _is_nothing(value) for name, value in options.items())
    wanted = module.o_proj(answer.reshape(1, 1, -1))
    if not known or mask is not None or len(result) != 2 or not torch.equal(result[0], wanted):
        return None
    scaling = options.get("scaling")
    scaling = depth**-0.5 if scaling is None else scaling
    other = DynamicCache()
    other.update(*past, module.layer_idx)
    room = room_of(other.layers[module.layer_idx])
    step = Step(module, scaling, turns)
    found = step.attend(module, x, (turn[0].view(-1), turn[1].view(-1)), room)
    for mine, theirs in ((room.keys, key), (room.values, value)):
        if not torch.equal(mine[:, :, : _BEFORE + 1], theirs):
            return None
    return step if _is_attention(found, query, key, value, scaling) else None


def _is_attention(
    found: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
) -> bool:
    """Tell whether what was found is attention, but for roundings."""
    groups, depth = query.shape[1] // key.shape[1], query.shape[3]
    rows = query.double().view(1, key.shape[1], groups, depth)
    keys, values = key.double().mT, value.double()
    sizes = (rows.abs() @ keys.abs() * abs(scaling)).amax()
    exact = (rows @ keys * scaling).softmax(-1) @ values
    # A score has a rounding for each product and sum; weights, of which each mean has as many as
    # tokens, have those of a score twice, and a few of their own. One of the result comes last.
    roundings = 2 * ((depth + 2) * sizes + key.shape[2] + 8) * 2.0**-24
    bound = roundings * values.abs().amax() + torch.finfo(found.dtype).eps / 2 * exact.abs()
    return bool(((found.double().view_as(exact) - exact).abs() <= bound).all())
