"""A child of fork() that uses its parent's layers gets a sentence at once, and can make its own."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ktmoe_driver import Stub
from ktmoe_layers import INNER, E, H, K, inputs, weights, wrapper

from ktk import KTMoEWrapper
from ktk.ktmoe import ModelState, steps

SENTENCE = "do not survive fork(); make a new WorkerPool after fork()"
SIZES = (E, K, H, INNER)
PATIENCE = 20.0  # seconds until a child counts as hanging

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


class Parent:
    """A layer that has done everything once, and has much to do when its process forks."""

    def __init__(self) -> None:
        self.few, self.many = inputs(2), inputs(20_000)
        self.weights = weights()
        state = ModelState()
        self.layer = wrapper(0, model=state, max_deferred_experts_per_token=1)
        self.next = wrapper(1, model=state)
        self.buffer = np.zeros(3 * H * INNER, np.uint16)
        self.layer.forward(*self.few)
        self.next.forward(*self.few)

    def begin(self) -> None:
        """Leave a call, what it defers, and a writer's job in the queue."""
        self.layer.submit_forward(*self.many)
        self.write()

    def write(self) -> None:
        w13, w2 = self.buffer.ctypes.data, self.buffer[2 * H * INNER :].ctypes.data
        self.layer.submit_write_weight_scale_to_buffer(1, 0, [w13], [0], [w2], [0])


def in_child(body: Callable[[], Any]) -> str:
    """Run something in a child; return what went wrong, or how it ended."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            torch.set_num_threads(1)  # torch's own threads hang, as they did not survive either
            body()
            words = "no error"
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        os.write(write, words.encode())
        os._exit(0)
    os.close(write)
    ended, _, _ = select.select([read], [], [], PATIENCE)
    words = os.read(read, 4096).decode() if ended else "hangs"
    os.close(read)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return words


ACTIONS: dict[str, Callable[[Parent], Any]] = {
    "submit_forward": lambda p: p.layer.submit_forward(*p.few),
    "sync_forward": lambda p: p.layer.sync_forward(p.many[0]),
    "forward": lambda p: p.next.forward(*p.few),
    "flush": lambda p: p.layer.flush(),
    "submit_write": lambda p: p.write(),
    "sync_write": lambda p: p.layer.sync_write_weight_scale_to_buffer(),
    "load": lambda p: p.layer.load_weights_from_tensors(*p.weights),
    "cpu_infer.sync": lambda p: p.layer.cpu_infer.sync(),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_what_needs_the_workers_ends_in_a_sentence(action: str) -> None:
    parent = Parent()
    parent.begin()
    words = in_child(lambda: ACTIONS[action](parent))
    assert SENTENCE in words
    parent.layer.sync_forward(parent.many[0])
    parent.layer.sync_write_weight_scale_to_buffer()


def test_an_idle_layer_gives_the_same_sentence() -> None:
    parent = Parent()
    for action in ("submit_forward", "submit_write", "load", "cpu_infer.sync"):
        words = in_child(lambda action=action: ACTIONS[action](parent))  # type: ignore[misc]
        assert SENTENCE in words


def test_a_child_drops_what_it_inherited_and_makes_its_own() -> None:
    parent = Parent()
    expected = wrapper().forward(*parent.few)
    parent.begin()

    def body() -> None:
        KTMoEWrapper.clear_buffer_cache()
        del parent.layer, parent.next
        own = KTMoEWrapper(0, *SIZES, cpuinfer_threads=2, threadpool_count=1, method="BF16")
        own.load_weights_from_tensors(*parent.weights)
        assert torch.equal(own.forward(*parent.few), expected)

    held = [parent.layer, parent.next]
    assert in_child(body) == "no error"
    held[0].sync_forward(parent.many[0])


def test_calls_on_streams_are_forgotten(driver: Stub, stream: int) -> None:
    parent = Parent()
    parent.layer.forward(*parent.few, stream)
    driver.synchronize(stream)
    steps._in_flight_lock.acquire()  # as another thread may have at this moment

    def body() -> None:
        # The driver does not survive either; what is ours must not hang before it is asked.
        with steps._in_flight_lock:
            assert not steps._in_flight
        parent.next.submit_forward(*parent.few, stream)

    try:
        assert SENTENCE in in_child(body)
    finally:
        steps._in_flight_lock.release()
