"""Page-locked CPU memory between a GPU's tensors and the workers.

Copies from and to the GPU run in the order of a stream, so that the next call on a stream may use
the buffers of a call whose result was asked for: layers of a model that are called in turns share
one set. A call that is submitted before that gets a set of its own. What a graph captured belongs
to the graph: its sets, for one number of tokens each, are used by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, eq=False)
class Staging:
    """Buffers for one call at a time, of up to a number of tokens."""

    hidden: torch.Tensor  # [tokens, hidden_size]
    ids: torch.Tensor  # [tokens, k]
    weights: torch.Tensor  # [tokens, k], f32
    out: torch.Tensor  # as hidden
    free: list[Staging]  # where it waits for the next call

    def first(self, tokens: int) -> Staging:
        """Return the part of the first tokens."""
        return replace(
            self,
            hidden=self.hidden[:tokens],
            ids=self.ids[:tokens],
            weights=self.weights[:tokens],
            out=self.out[:tokens],
        )

    def release(self) -> None:
        """Leave the buffers to the next call, which its stream runs after what used them."""
        self.free.append(self)

    def copy_in(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy the inputs of a call, in the order of the current stream."""
        self.hidden.copy_(hidden, non_blocking=True)
        self.ids.copy_(ids, non_blocking=True)
        self.weights.copy_(weights.float(), non_blocking=True)


# What buffers must agree with a call in; the model is the owner of the cache.
Key = tuple[torch.device, torch.dtype, torch.dtype, int, int]


class StagingCache:
    """The buffers of one model that no call uses."""

    def __init__(self) -> None:
        self._eager: dict[tuple[Key, int], list[Staging]] = {}
        self._captured: dict[tuple[Key, int], list[Staging]] = {}

    def eager(self, hidden: torch.Tensor, ids: torch.Tensor, stream: int) -> Staging:
        """Return buffers for a call that a stream runs once; they grow with the calls."""
        key, tokens = _key(hidden, ids), hidden.shape[0]
        free = self._eager.setdefault((key, stream), [])
        if not free:
            return _allocate(key, tokens, free)
        found = free.pop()
        if found.hidden.shape[0] >= tokens:
            return found
        _synchronize(hidden.device)
        return _allocate(key, tokens, free)

    def captured(self, hidden: torch.Tensor, ids: torch.Tensor) -> Staging:
        """Return buffers for a call of exactly this many tokens that a graph keeps."""
        key, tokens = _key(hidden, ids), hidden.shape[0]
        free = self._captured.setdefault((key, tokens), [])
        return free.pop() if free else _allocate(key, tokens, free)

    def clear(self) -> None:
        """Drop all buffers, when the streams have passed them."""
        for device in {key[0][0] for key in (*self._eager, *self._captured)}:
            _synchronize(device)
        self._eager.clear()
        self._captured.clear()


def _key(hidden: torch.Tensor, ids: torch.Tensor) -> Key:
    return hidden.device, hidden.dtype, ids.dtype, hidden.shape[1], ids.shape[1]


def _allocate(key: Key, tokens: int, free: list[Staging]) -> Staging:
    device, dtype, id_dtype, width, top_k = key
    # Without an accelerator there is nobody to lock pages for, and asking for it fails.
    pinned = device.type != "cpu"

    def buffer(columns: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(tokens, columns, dtype=kind, pin_memory=pinned, device="cpu")

    return Staging(
        buffer(width, dtype),
        buffer(top_k, id_dtype),
        buffer(top_k, torch.float32),
        buffer(width, dtype),
        free,
    )


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
