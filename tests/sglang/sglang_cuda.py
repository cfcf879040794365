"""What the engines call of torch.cuda, where there is no GPU: CPU tensors are the GPU's.

Operations of torch are done at once, as if the main stream were always empty. Other streams are
those of tests/ktmoe/stub_driver.c, which ktk finds as the driver, or, without one, have the handle
0 and are done at once as well. So a stream has work of ktk only, and waiting for an event waits
for the stream that it was recorded on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from ktmoe_driver import Stub


class Stream:
    """A stream that engines make, or the main stream."""

    def __init__(self, driver: Stub | None) -> None:
        self.driver = driver
        self.cuda_stream = driver.stream() if driver else 0
        self.capturing = False

    def synchronize(self) -> None:
        if self.driver and not self.capturing:
            self.driver.synchronize(self.cuda_stream)

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Event:
    """An event; recorded on a stream, it has happened when that has done what it had then."""

    def __init__(self) -> None:
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        if self.stream:
            self.stream.synchronize()


class Cuda:
    """torch.cuda."""

    def __init__(self, driver: Stub | None) -> None:
        self.driver = driver
        self.main = Stream(None)
        self.current = self.main
        self.streams: list[Stream] = []

    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "Stream", self.make)
        patch.setattr(torch.cuda, "Event", Event)
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: self.synchronize())
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)

    def make(self, device: torch.device | None = None) -> Stream:
        self.streams.append(Stream(self.driver))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def synchronize(self) -> None:
        for stream in self.streams:
            stream.synchronize()

    def close(self) -> None:
        for stream in self.streams:
            if self.driver:
                stream.synchronize()
                self.driver.destroy(stream.cuda_stream)
