"""Page-locked CPU memory between a GPU's tensors and the workers.

Copies from and to the GPU run in the order of a stream, and so does everything that reads and
writes here: all layers of a model that run on one stream share one set of buffers. What a graph
captured belongs to the graph: its sets, one for each number of tokens, are used by nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Staging:
    """Buffers for calls of up to a number of tokens."""

    hidden: torch.Tensor  # [tokens, hidden_size]
    ids: torch.Tensor  # [tokens, k]
    weights: torch.Tensor  # [tokens, k], f32
    out: torch.Tensor  # as hidden

    def first(self, tokens: int) -> Staging:
        """Return the part of the first tokens."""
        parts = (self.hidden, self.ids, self.weights, self.out)
        return Staging(*(part[:tokens] for part in parts))

    def copy_in(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Copy the inputs of a call, in the order of the current stream."""
        self.hidden.copy_(hidden, non_blocking=True)
        self.ids.copy_(ids, non_blocking=True)
        self.weights.copy_(weights.float(), non_blocking=True)


# What buffers must agree with a call in; the model is the owner of the cache.
Key = tuple[torch.device, torch.dtype, torch.dtype, int, int]


class StagingCache:
    """The buffers of one model."""

    def __init__(self) -> None:
        self._eager: dict[tuple[Key, int], Staging] = {}
        self._captured: dict[tuple[Key, int], Staging] = {}

    def eager(self, hidden: torch.Tensor, ids: torch.Tensor, stream: int) -> Staging:
        """Return buffers for calls that a stream runs once; they grow with the calls."""
        key, tokens = (_key(hidden, ids), stream), hidden.shape[0]
        found = self._eager.get(key)
        if found is None or found.hidden.shape[0] < tokens:
            _synchronize(hidden.device if found else None)
            self._eager[key] = found = _allocate(key[0], tokens)
        return found.first(tokens)

    def captured(self, hidden: torch.Tensor, ids: torch.Tensor) -> Staging:
        """Return buffers for calls of exactly this many tokens that a graph keeps."""
        key = (_key(hidden, ids), hidden.shape[0])
        if key not in self._captured:
            self._captured[key] = _allocate(*key)
        return self._captured[key]

    def clear(self) -> None:
        """Drop all buffers, when the streams have passed them."""
        for device in {key[0][0] for key in (*self._eager, *self._captured)}:
            _synchronize(device)
        self._eager.clear()
        self._captured.clear()


def _key(hidden: torch.Tensor, ids: torch.Tensor) -> Key:
    return hidden.device, hidden.dtype, ids.dtype, hidden.shape[1], ids.shape[1]


def _allocate(key: Key, tokens: int) -> Staging:
    device, dtype, id_dtype, width, top_k = key
    # Without an accelerator there is nobody to lock pages for, and asking for it fails.
    pinned = device.type != "cpu"

    def buffer(columns: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(tokens, columns, dtype=kind, pin_memory=pinned)

    return Staging(
        buffer(width, dtype),
        buffer(top_k, id_dtype),
        buffer(top_k, torch.float32),
        buffer(width, dtype),
    )


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)
