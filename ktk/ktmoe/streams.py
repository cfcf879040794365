"""CUDA streams by their handles, as engines pass them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from ktk import _core


def handle_of(stream: int | torch.Stream | None, device: torch.device) -> int:
    """Return a stream's handle: 0 is the default stream, and for CPU tensors no stream at all."""
    if stream is None:
        on_gpu = device.type != "cpu"
        return int(torch.cuda.current_stream(device).cuda_stream) if on_gpu else 0
    handle = getattr(stream, "cuda_stream", stream)
    if not isinstance(handle, int) or handle < 0:
        raise TypeError(
            f"cuda_stream must be a stream's handle (torch.cuda.Stream.cuda_stream), 0 or None, "
            f"got {stream!r}"
        )
    return handle


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor has to be copied to reach the workers."""
    return tensor.device.type != "cpu"


def on_stream(handle: int, device: torch.device) -> AbstractContextManager[object]:
    """Make a stream, which torch need not know, and its GPU the current ones.

    The GPU, too, where the stream is: to the driver the default stream is that of the current GPU.
    """
    if device.type == "cpu":
        return nullcontext()
    if torch.cuda.current_stream(device).cuda_stream == handle:
        return torch.cuda.device(device)
    if handle == 0:  # for which torch would take a stream of its own
        return torch.cuda.stream(torch.cuda.default_stream(device))
    foreign = torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(foreign)


def is_capturing(handle: int, device: torch.device) -> bool:
    """Whether what is enqueued on a stream becomes part of a graph."""
    with on_stream(handle, device):
        return _core.stream_is_capturing(handle)
