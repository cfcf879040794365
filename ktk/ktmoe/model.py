"""What the layers of one model share: an error to report, buffers, deferred experts."""

from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch

from ktk import _core
from ktk.ktmoe.staging import StagingCache
from ktk.ktmoe.streams import handle_of, is_capturing, on_stream
from ktk.ktmoe.submitted import Carried, Step


class ModelState:
    """The state of one model's layers between their calls.

    Layers that are made without ``model=`` find one by their weights, sizes and workers; a layer
    number that such a state already has begins a new one. Where states that were found so have
    different layers, nobody knows which layers are one model, and calls that could lose deferred
    experts are refused (:meth:`check_chain`): make a state, and pass it to all layers of a model.

    The layers of a model are called in ascending order, one at a time.
    """

    def __init__(self) -> None:
        self.errors = _core.Latch()
        self.staging = StagingCache()
        # Of graphs, by the layer that has their weights.
        self.captured_calls: WeakKeyDictionary[object, list[_core.AsyncCall]] = WeakKeyDictionary()
        self._key: Hashable = None  # of a state that layers found; None for one that was given
        self._layers: WeakValueDictionary[int, object] = WeakValueDictionary()
        self._carried: Carried | None = None
        self._sums: dict[tuple[Any, ...], tuple[torch.Tensor, _core.Carry]] = {}
        _states.add(self)

    @classmethod
    def of_layer(cls, key: Hashable, layer_idx: int) -> ModelState:
        """Return the state of the model that a new layer continues, or a new one."""
        state = _by_key.get(key)
        if state is None or layer_idx in state._layers:
            _by_key[key] = state = cls()
            state._key = key
        return state

    def add_layer(self, layer_idx: int, layer: object) -> None:
        """Register a layer, without keeping it alive."""
        if layer_idx in self._layers:
            raise ValueError(f"the model has a layer {layer_idx} already")
        self._layers[layer_idx] = layer

    def check(self) -> None:
        """Raise what went wrong in a call that nobody waited for."""
        self.errors.check()

    def check_chain(self, layer_idx: int, defers: bool) -> None:
        """Refuse a call if deferred experts could be lost between this state and another.

        A layer that was made while another of its number lived has begun a new state. It may
        belong to a model of its own, or have replaced the other one; or the other one was made to
        try something, before the model. A state that has all layers of the others is a model.
        """
        if self._key is None:
            return
        others = [state for state in list(_states) if state is not self and state._key == self._key]
        if not others:
            return
        left = [state._carried for state in others if state._carried is not None]
        if not defers and all(carried.layer_idx >= layer_idx for carried in left):
            return
        if self._lacks(others):
            gc.collect()  # of layers that are there only because an exception was
        if lacks := self._lacks(others):
            raise RuntimeError(
                f"layer {layer_idx} was found to be of another model than layer {min(lacks)}, "
                "because two layers of one number, with the same weights, sizes and workers, were "
                "there at once; if they are of one model, deferred experts would be lost. Make the "
                "layers of a model with the same model=ModelState(), and let go of a layer before "
                "another one replaces it"
            )

    def _lacks(self, others: list[ModelState]) -> set[int]:
        """Return the numbers of layers that only other states have."""
        return {number for state in others for number in list(state._layers)} - set(self._layers)

    # --- deferred experts -----------------------------------------------------------------------

    def take(
        self, layer_idx: int, hidden: torch.Tensor, captured: bool, on_pool: bool
    ) -> Carried | None:
        """Return what an earlier layer has left to this one, which now owns it."""
        left, self._carried = self._carried, None
        if left is None:
            return None
        if layer_idx <= left.layer_idx:
            raise RuntimeError(
                f"layer {layer_idx} was called, but the deferred experts of layer "
                f"{left.layer_idx} were never added: give the last layer "
                "max_deferred_experts_per_token=0, or call flush() after it; they are dropped now"
            )
        if list(left.sums.shape) != list(hidden.shape) or captured != left.captured:
            kind = {True: "a captured call", False: "a call"}
            raise RuntimeError(
                f"layer {layer_idx} was called with {kind[captured]} of {hidden.shape[0]} tokens, "
                f"but layer {left.layer_idx} left the deferred experts of {kind[left.captured]} of "
                f"{left.sums.shape[0]}; they are dropped now"
            )
        if on_pool and not _step_of(left).on_pool:
            raise RuntimeError(
                f"layer {layer_idx} was called without a stream, but layer {left.layer_idx} on "
                "one, which may have yet to start what it deferred; it is dropped now"
            )
        return left

    def room(self, layer_idx: int, hidden: torch.Tensor, stream: int | None) -> Carried:
        """Return where a call on a stream, or in a graph if that is None, leaves deferred experts.

        One buffer for each size is enough for a stream: its calls run in turn, and each takes what
        is there before it leaves anything.
        """
        key = (*hidden.shape, hidden.device, stream)
        if key not in self._sums:
            pinned = hidden.device.type != "cpu"
            sums = torch.zeros(hidden.shape, dtype=torch.float32, device="cpu", pin_memory=pinned)
            if stream is not None:
                self._drop_sums(hidden.device, stream)
            array: Any = sums
            self._sums[key] = (sums, _core.Carry(array))
        sums, carry = self._sums[key]
        return Carried(layer_idx, sums, carry, captured=stream is None)

    def leave(self, carried: Carried | None) -> None:
        """Keep what a call leaves to the next layer, if anything."""
        self._carried = carried

    def flush(self, cuda_stream: int | None = None) -> torch.Tensor | None:
        """Return what the last layer has left, f32 [tokens, hidden_size]; None if nothing.

        On a stream it is there when the stream has passed this point; with CPU tensors it is then
        a buffer that the next call of a layer that defers writes to again.
        """
        self.check()
        left = self._carried
        if left is None:
            return None
        step = _step_of(left)
        stream = handle_of(cuda_stream, step.device)
        if stream != step.stream and not step.on_pool:
            raise ValueError(
                f"layer {left.layer_idx} was submitted on stream {step.stream:#x}, but flush names "
                f"{stream:#x}"
            )
        at_once = not stream and step.on_pool
        if left.captured != (not at_once and is_capturing(stream, step.device)):
            was = "" if left.captured else "not "
            raise RuntimeError(
                f"the call of layer {left.layer_idx} was {was}captured into a graph, and flush has "
                "to be where that call is: each replay defers experts anew"
            )
        self._carried = None
        if at_once:
            step.call.wait(all=True)
            self.check()
            return left.sums.clone()
        with on_stream(stream, step.device):
            step.call.wait_on(stream, all=True)
            if step.staging is None:
                return left.sums
            out = torch.empty(left.sums.shape, dtype=torch.float32, device=step.device)
            return out.copy_(left.sums, non_blocking=True)

    def reset(self) -> None:
        """Drop deferred experts that nobody will ask for: the forward pass was given up."""
        self._carried = None

    # --- memory ---------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop buffers, and graphs' calls with them; what a layer has just left stays."""
        self.staging.clear()
        self.captured_calls.clear()
        self._sums.clear()

    def _drop_sums(self, device: torch.device, stream: int) -> None:
        """Keep one size only of a stream: prompts have any number of tokens."""
        for key in [key for key in self._sums if key[-2:] == (device, stream)]:
            del self._sums[key]


def _step_of(left: Carried) -> Step:
    assert left.step is not None, "left before it was submitted"
    return left.step


_by_key: WeakValueDictionary[Hashable, ModelState] = WeakValueDictionary()
_states: WeakSet[ModelState] = WeakSet()


def clear_all() -> None:
    """Drop the buffers of all models."""
    for state in list(_states):
        state.clear()
