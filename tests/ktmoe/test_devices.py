"""Which GPU and stream are the current ones where the driver is called, of a machine with several.

`torch.cuda` only writes down what is asked of it, and the tensors of its GPU are on "meta".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktk import _core
from ktk.ktmoe.steps import Inputs, result_on_stream, submit_on_stream
from ktk.ktmoe.streams import is_capturing, on_stream

GPU = torch.device("meta")


class Machine:
    """Two GPUs, the first of which is current; each has a default stream, 0, as its current one."""

    def __init__(self) -> None:
        self.device: object = "first"
        self.streams: dict[object, int] = {}

    def current_stream(self, device: object) -> Any:
        return SimpleNamespace(cuda_stream=self.streams.get(device, 0))

    def default_stream(self, device: object) -> Any:
        return SimpleNamespace(cuda_stream=0, device=device)

    def external_stream(self, handle: int, device: object) -> Any:
        assert handle, "torch takes a stream of its own for this"
        return SimpleNamespace(cuda_stream=handle, device=device)

    @contextmanager
    def current_device(self, device: object) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self.streams.get(stream.device, 0)
        with self.current_device(stream.device):
            self.streams[stream.device] = stream.cuda_stream
            yield
        self.streams[stream.device] = before

    def now(self) -> tuple[object, int]:
        return self.device, self.streams.get(self.device, 0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    for name in ("current_stream", "default_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch.cuda, "ExternalStream", made.external_stream)
    monkeypatch.setattr(torch.cuda, "device", made.current_device)
    return made


@pytest.mark.parametrize("current", [0, 7])
@pytest.mark.parametrize("named", [0, 7, 9])
def test_the_named_stream_of_the_tensors_gpu_is_current(
    machine: Machine, current: int, named: int
) -> None:
    machine.streams[GPU] = current
    with on_stream(named, GPU):
        assert machine.now() == (GPU, named)
    assert machine.device == "first"
    assert machine.streams[GPU] == current


@pytest.mark.parametrize("named", [0, 7])
def test_the_driver_is_called_where_the_tensors_gpu_is_current(
    machine: Machine, named: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def note(*_: object) -> bool:
        seen.append(machine.now())
        return False

    monkeypatch.setattr(_core, "stream_is_capturing", note)
    assert not is_capturing(named, GPU)
    call: Any = SimpleNamespace(start_on=note, wait_on=note, done=True)
    what: Any = SimpleNamespace(call=lambda *_, **__: call)
    row = torch.zeros(1, 8)
    buffers = SimpleNamespace(copy_in=note, hidden=row, ids=row, weights=row, out=row)
    staging = SimpleNamespace(first=lambda tokens: buffers, release=lambda: None)
    state: Any = SimpleNamespace(staging=SimpleNamespace(eager=lambda *_: staging))
    there = row.to(GPU)
    inputs = Inputs(there, there, there, named, torch.float32, copied=False)
    step = submit_on_stream(what, state, inputs, False, None, None)
    assert result_on_stream(step).device == GPU
    assert seen == [(GPU, named)] * 4  # capturing, copies, start, wait
