"""One call of one layer, from its submission to its result: on the pool, or on a CUDA stream.

=================  ======================  =====================================================
tensors            stream                  the call
=================  ======================  =====================================================
CPU                0 or None               is queued on the pool at once; inputs are copied
CPU                a handle                starts when the stream gets there; inputs are copied,
                                           or, in a capture, read again at every replay
GPU                a handle                likewise, between asynchronous copies to and from
                                           page-locked buffers
=================  ======================  =====================================================
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch

from ktk import _core
from ktk.arrays import refuse_gradient
from ktk.dtypes import FLOAT_NAMES
from ktk.ktmoe.model import ModelState
from ktk.ktmoe.streams import handle_of, on_gpu, on_stream
from ktk.ktmoe.submitted import Carried, Step

# Calls on streams, which may have yet to get there when the last one who knew the call is gone.
_in_flight: list[_core.AsyncCall] = []
_in_flight_lock = threading.Lock()


def _forget() -> None:
    """Let go of the parent's calls; a thread of it may hold the lock for ever."""
    global _in_flight_lock
    _in_flight_lock = threading.Lock()
    _in_flight.clear()


os.register_at_fork(after_in_child=_forget)


# What the workers read as it is; the rest is converted, as kt-kernel does.
_HIDDEN = tuple(FLOAT_NAMES)
_IDS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class Inputs:
    """What a layer is called with, checked: [tokens, hidden_size], and twice [tokens, k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    stream: int
    dtype: torch.dtype  # of the result: of the hidden states before they were converted
    copied: bool  # not the caller's memory

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        width: int,
        top_k: int,
        cuda_stream: int | None,
    ) -> Inputs:
        """Check shapes and devices; leading dimensions are tokens. Columns may be strided."""
        for name, tensor, columns in (
            ("hidden_states", hidden, width),
            ("topk_ids", ids, top_k),
            ("topk_weights", weights, top_k),
        ):
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
            refuse_gradient(name, tensor)
            if tensor.device.type not in ("cpu", "cuda") or tensor.layout != torch.strided:
                raise TypeError(
                    f"{name} must be a dense tensor in CPU memory or on a CUDA GPU, got a "
                    f"{tensor.layout} one on {tensor.device}"
                )
            if tensor.ndim < 1 or tensor.shape[-1] != columns:
                raise ValueError(f"{name} must be [..., {columns}], got {list(tensor.shape)}")
            if tensor.device != hidden.device:
                raise ValueError(f"{name} is on {tensor.device}, hidden_states on {hidden.device}")
            integers = not (tensor.is_floating_point() or tensor.is_complex())
            if integers != (tensor is ids) or tensor.is_complex() or tensor.dtype == torch.bool:
                kind = "integers" if tensor is ids else "floats"
                raise TypeError(f"{name} must be {kind}, got {tensor.dtype}")
        stream = handle_of(cuda_stream, hidden.device)
        with on_stream(stream, hidden.device):
            flat = cls(
                _rows(hidden, _HIDDEN, torch.float32),
                _rows(ids, _IDS, torch.int64),
                _rows(weights, _HIDDEN, torch.float32),
                stream,
                hidden.dtype,
                copied=False,
            )
        tokens = flat.hidden.shape[0]
        for name, tensor in (("topk_ids", flat.ids), ("topk_weights", flat.weights)):
            if tensor.shape[0] != tokens:
                raise ValueError(f"{name} has {tensor.shape[0]} tokens, hidden_states has {tokens}")
        pairs = ((flat.hidden, hidden), (flat.ids, ids), (flat.weights, weights))
        return replace(flat, copied=any(row.data_ptr() != t.data_ptr() for row, t in pairs))


def _rows(
    tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], otherwise: torch.dtype
) -> torch.Tensor:
    """Return rows whose elements are neighbours and of a dtype that the workers read."""
    # Of a view such as z.conj().imag, memory has the values negated, and the workers read memory.
    rows = tensor.detach().resolve_neg().reshape(-1, tensor.shape[-1])
    rows = rows if tensor.dtype in dtypes else rows.to(otherwise)
    return rows if on_gpu(rows) or rows.stride(-1) == 1 else rows.contiguous()


@dataclass(frozen=True)
class Submission:
    """What does not depend on where a call runs."""

    layer: _core.MoE
    name: str
    mask: torch.Tensor
    deferred: int
    batch_union: bool
    owner: object  # whose weights these are: graphs can be replayed as long as it lives

    def call(
        self,
        state: ModelState,
        inputs: Inputs,
        out: torch.Tensor,
        give: Carried | None,
        take: Carried | None,
        *,
        stable: bool = False,
        live: bool = False,
    ) -> _core.AsyncCall:
        """Make the call; it is not started."""
        hidden: Any = inputs.hidden  # arrays as the stub has them: anything with DLPack is taken
        ids: Any = inputs.ids
        weights: Any = inputs.weights
        mask: Any = self.mask
        result: Any = out
        return _core.AsyncCall(
            self.layer,
            hidden,
            ids,
            weights,
            mask,
            result,
            state.errors,
            name=self.name,
            deferred=self.deferred if give else 0,
            batch_union=self.batch_union,
            give=give.carry if give else None,
            take=take.carry if take else None,
            stable=stable,
            live=live,
        )


def submit_on_pool(
    what: Submission,
    state: ModelState,
    inputs: Inputs,
    give: Carried | None,
    take: Carried | None,
) -> Step:
    """Queue a call on the layer's pool."""
    out = torch.empty(inputs.hidden.shape, dtype=inputs.hidden.dtype, device="cpu")
    call = what.call(state, inputs, out, give, take)
    call.start()
    return Step(call, out, None, 0, inputs.hidden.device, inputs.dtype)


def submit_on_stream(
    what: Submission,
    state: ModelState,
    inputs: Inputs,
    captured: bool,
    give: Carried | None,
    take: Carried | None,
) -> Step:
    """Let a stream start a call."""
    stream, staging = inputs.stream, None
    if not on_gpu(inputs.hidden):
        if inputs.dtype not in _HIDDEN:
            raise TypeError(
                f"hidden_states is {inputs.dtype}: on a stream, tensors in CPU memory must be "
                "bfloat16, float16 or float32, because the stream cannot convert the result"
            )
        if captured and inputs.copied:
            raise ValueError(
                "a graph reads its inputs again at every replay, but a tensor that was given has "
                "leading dimensions that only a copy makes one, strided columns, memory that has "
                "the values negated, or a dtype that is converted; pass [tokens, ...] with "
                "contiguous rows, and ids in int32 or int64"
            )
        out = torch.empty(inputs.hidden.shape, dtype=inputs.hidden.dtype, device="cpu")
        call = what.call(state, inputs, out, give, take, live=captured)
    else:
        hidden = inputs.hidden
        staging = (
            state.staging.captured(hidden, inputs.ids)
            if captured
            else state.staging.eager(hidden, inputs.ids, stream)
        )
        buffers = staging.first(hidden.shape[0])
        with on_stream(stream, hidden.device):
            buffers.copy_in(hidden, inputs.ids, inputs.weights)
        staged = replace(inputs, hidden=buffers.hidden, ids=buffers.ids, weights=buffers.weights)
        out = buffers.out
        call = what.call(state, staged, out, give, take, stable=True, live=captured)
    with on_stream(stream, inputs.hidden.device):
        call.start_on(stream)
    if captured:
        state.captured_calls.setdefault(what.owner, []).append(call)
    else:
        with _in_flight_lock:
            _in_flight[:] = [*(earlier for earlier in _in_flight if not earlier.done), call]
    return Step(call, out, staging, stream, inputs.hidden.device, inputs.dtype)


def result_on_stream(step: Step) -> torch.Tensor:
    """Let the stream wait for a call, and return where its result will be then."""
    with on_stream(step.stream, step.device):
        step.call.wait_on(step.stream)
        if step.staging is None:
            return step.out
        out = torch.empty(step.out.shape, dtype=step.out.dtype, device=step.device)
        # Converted there: a copy that converts reads CPU memory at once, not in the stream's order.
        result = out.copy_(step.out, non_blocking=True).to(step.dtype)
    step.staging.release()
    return result
