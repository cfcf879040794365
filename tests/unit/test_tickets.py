"""Calls that are submitted and forgotten."""

from __future__ import annotations

import threading
import time

import numpy as np

import ktk


def test_python_goes_on_while_a_forgotten_call_ends() -> None:
    """The ticket waits for its call when it goes; the other threads of Python do not."""
    experts, hidden, tokens = 8, 512, 1024
    moe = ktk.load_backend("BF16").moe(
        num_experts=experts,
        num_experts_per_tok=experts,
        hidden_size=hidden,
        intermediate_size=hidden,
        pool=ktk.WorkerPool(1, pin=False),
    )
    weight = np.zeros((experts, hidden, hidden), np.float32)
    moe.load(weight, weight, weight)
    ids = np.tile(np.arange(experts), (tokens, 1))
    arrays = np.zeros((tokens, hidden), np.float32), ids, np.ones((tokens, experts), np.float32)

    steps: list[float] = []
    stop = threading.Event()

    def step() -> None:
        while not stop.is_set():
            steps.append(time.perf_counter())
            time.sleep(0.001)

    other = threading.Thread(target=step)
    other.start()
    tickets = [moe.submit(*arrays) for _ in range(4)]
    begin = time.perf_counter()
    tickets.pop()
    end = time.perf_counter()
    stop.set()
    other.join()
    within = [at for at in steps if begin < at < end]
    assert end - begin > 0.02, "the calls were over at once"
    # While it waits with the GIL, none but those of the two borders.
    assert len(within) > 3
