"""A layer with one token in one call, or its sums and norms in two, where a module takes five.

The one call is for layers whose attention and experts are ktk's, too (`whole_layers`).

What a layer does is found by asking it, with other modules in the place of its attention and its
experts: it has to hand both what ktk would, and to return the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

from ktk import _core
from ktk.hosts.plain import is_constant, is_plain
from ktk.transformers.bare import are_bare
from ktk.transformers.norms import FastNorm
from ktk.transformers.swap import add_to_class
from ktk.transformers.whole_layers import HALVES, WholeLayer, whole_layer

# Arguments that a layer hands to its attention as they are.
_HANDED = ("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings")


class FastLayer:
    """What is added to a class of layers."""

    _modules: dict[str, Any]
    #: In one call, for as long as the layer is as it was; None where that is not for ktk to do.
    ktk_whole: WholeLayer | None = None

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what the class would."""
        if not args and is_plain(hidden_states) and hidden_states.shape[:-1] == (1, 1):
            x = hidden_states.detach() if hidden_states.requires_grad else hidden_states
            x = x if x.is_contiguous() else x.contiguous()
            whole = self.ktk_whole
            if whole is None or not whole.holds_for(self, x.dtype):
                whole = whole_layer(self, x)
                if whole is not self.ktk_whole:
                    self.ktk_whole = whole
            out = None if whole is None else whole(x, **kwargs)
            if out is not None:
                return out
            norms = [self._modules[norm] for norm, _ in HALVES]
            weights = _weights(norms, x)
            if weights is not None:
                return _compute(self._modules, norms, weights, x, kwargs)
        return super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]


def _weights(norms: Any, x: torch.Tensor) -> Any:
    """Return the weights of norms; None where these are no norms that ktk computes."""
    found = []
    for one in norms:
        if not isinstance(one, FastNorm):
            return None
        weight = one._parameters["weight"]  # type: ignore[attr-defined]
        if not is_constant(weight, x.dtype):
            return None
        found.append(weight.detach())
    return found if are_bare(norms) else None


def _compute(found: Any, norms: Any, weights: Any, x: torch.Tensor, options: Any) -> torch.Tensor:
    normed = torch.empty_like(x)
    given = to_dlpack(x), to_dlpack(weights[0]), to_dlpack(normed)
    _core.rms_norm(*given, *norms[0].ktk_norm)
    attended = found["self_attn"](hidden_states=normed, **options)[0]
    # Adapters, hooks and autocast may have made something else of it.
    if is_plain(attended) and attended.dtype == x.dtype and attended.shape == x.shape:
        both, normed = torch.empty_like(x), torch.empty_like(x)
        terms = to_dlpack(x), to_dlpack(attended.detach()), to_dlpack(weights[1])
        _core.add_rms_norm(*terms, to_dlpack(both), to_dlpack(normed), *norms[1].ktk_norm)
    else:
        both = x + attended
        normed = norms[1](both)
    result: torch.Tensor = both + found["mlp"](normed)
    return result


class _Asked(nn.Module):
    """Stands for what a layer calls, and keeps what with."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer
        self.given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.given.append((args, kwargs))
        return self.answer


def speed_up_layers(model: nn.Module) -> None:
    """Let ktk compute sums and norms of layers that are two halves of norm, module and sum."""
    for module in model.modules():
        if not isinstance(module, FastLayer) and is_layer(module):
            add_to_class(module, FastLayer)


def is_layer(module: Any) -> bool:
    """Tell whether a layer is a norm, attention and a sum, and the same with experts or an MLP."""
    kept = {name: module._modules.get(name) for half in HALVES for name in half}
    norms = [kept[norm] for norm, _ in HALVES]
    if None in kept.values() or not all(isinstance(one, FastNorm) for one in norms):
        return False
    weight = norms[0].weight
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad(), torch.device("cpu"):
        x, attended, made = torch.randn(
            3, 1, 1, len(weight), generator=generator, dtype=torch.float32, device="cpu"
        ).to(weight.dtype)
        attention, mlp = _Asked((attended, None)), _Asked(made)
        handed: dict[str, Any] = {name: object() for name in (*_HANDED, "ktk_other")}
        module._modules |= {"self_attn": attention, "mlp": mlp}
        try:
            result = module.forward(x, **handed)
            fast = _compute(module._modules, norms, _weights(norms, x), x, handed)
        except Exception:
            return False  # of a class that wants something else
        finally:
            module._modules |= kept
    if len(attention.given) != 2 or len(mlp.given) != 2 or not isinstance(result, torch.Tensor):
        return False
    (args, theirs), (_, mine) = attention.given
    hidden = theirs.pop("hidden_states", None), mine.pop("hidden_states")
    same = not args and theirs.keys() == mine.keys() and all(theirs[n] is mine[n] for n in mine)
    inputs = [one[0] for one, _ in mlp.given]
    return (
        same
        and isinstance(hidden[0], torch.Tensor)
        and torch.equal(*hidden)
        and torch.equal(*inputs)
        and not any(kwargs or len(one) != 1 for one, kwargs in mlp.given)
        and torch.equal(result, fast)
    )
