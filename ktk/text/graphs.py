"""Steps of one token on a GPU, captured and replayed.

transformers starts some 60 kernels a layer for one token, one after the other, on the CPU that is
to compute experts. A captured graph starts all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

Replay = Callable[[], Any]
Capture = Callable[[Replay], Replay]
# Of the smallest cache; each next one has twice as many tokens.
_LEAST = 1024


def captured(step: Replay, device: torch.device) -> Replay:
    """Capture a step of a GPU; returns what computes it again and returns the same tensors."""
    graph = torch.cuda.CUDAGraph()
    # A stream of that GPU: torch's own one is of the GPU that was current at the first capture.
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.graph(graph, stream=stream):
        made = step()

    def replay() -> Any:
        graph.replay()
        return made

    return replay


def captures(model: Any) -> bool:
    """Whether steps of a model can be captured: a GPU has it, and nothing but tensors changes."""
    if model.device.type != "cuda" or not callable(getattr(model, "get_compiled_call", None)):
        return False
    # Other kinds of layers have state in Python, such as how far a window has slid.
    return bool(getattr(model, "_can_compile_fullgraph", False)) and all(
        type(layer) is StaticLayer for layer in static_cache(model, 1).layers
    )


def room_for(tokens: int, context: int | None = None) -> int:
    """Return how many tokens a cache is made for that has to hold some; few sizes are captured."""
    room = max(_LEAST, 1 << (tokens - 1).bit_length())
    return room if context is None else min(room, context)


def static_cache(model: Any, tokens: int) -> Any:
    """Return a cache that has room for so many tokens and stays where it is."""
    return StaticCache(config=model.config.get_text_config(decoder=True), max_cache_len=tokens)


class Step:
    """Computes a step of one token as a model does, and is called as the model is.

    The second call with inputs of the same shapes, behind the same cache, captures the step; what
    it returns is written again by the next one. A step that cannot be captured is computed as it
    is.

    Parameters
    ----------
    model
        Of transformers.
    capture
        Takes a step and returns what replays it; default: `captured`, on the model's GPU.
    """

    def __init__(self, model: Any, capture: Capture | None = None) -> None:
        self._model = model
        self._capture = capture or partial(captured, device=model.device)
        self._like: Any = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._replay: Replay | None = None
        self._fails = False

    def __call__(self, **inputs: Any) -> Any:
        """Compute logits and lengthen the cache."""
        tensors = {name: one for name, one in inputs.items() if isinstance(one, torch.Tensor)}
        others = {name: one for name, one in inputs.items() if name not in tensors}
        if self._fails or any(isinstance(one, dict) for one in others.values()):
            return self._model(**inputs)
        like = {name: (one.shape, one.dtype) for name, one in tensors.items()}, others
        if like != self._like:
            self._like, self._replay = like, None
            return self._model(**inputs)
        if self._replay is None:
            self._buffers = {name: one.clone() for name, one in tensors.items()}
            try:
                self._replay = self._capture(partial(self._model, **self._buffers, **others))
            # Such as a rotary embedding that asks how long the text is.
            except RuntimeError:
                self._fails = True
                return self._model(**inputs)
        for name, one in tensors.items():
            self._buffers[name].copy_(one)
        return self._replay()


class Steps:
    """A context manager in which `generate` has its steps captured, and a cache that fits them.

    Parameters
    ----------
    model
        Of transformers; see `captures`.
    context
        Most tokens that the model takes; None if there is no such limit.
    capture
        As of `Step`.
    """

    def __init__(
        self,
        model: Any,
        context: int | None = None,
        capture: Capture | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._step = Step(model, capture)
        self._cache: Any = None
        self._tokens = 0

    def holds(self, tokens: int) -> bool:
        """Whether the cache has room for so many."""
        return tokens <= self._tokens

    def cache(self, tokens: int, kept: int) -> Any:
        """Return a cache with room for so many tokens; only one that `holds` them can have some."""
        if not self.holds(tokens):
            self._tokens = room_for(tokens, self._context)
            self._cache = static_cache(self._model, self._tokens)
        elif not kept:
            self.cut(0)
        return self._cache

    # As the tensors of a cache that `generate` fills there.
    @torch.inference_mode()
    def cut(self, tokens: int) -> None:
        """Forget all but the first tokens; the others are written again before they are read."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(tokens)

    def __enter__(self) -> Self:
        # The public place where transformers asks for what computes steps behind such a cache.
        self._model.get_compiled_call = lambda config: self._step
        return self

    def __exit__(self, *_: object) -> None:
        del self._model.get_compiled_call
