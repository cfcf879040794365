"""Threads of Python that use the same things at once.

They take turns inside the core, so that each gets what it would get alone. Interpreters without a
lock (CPython's free-threaded builds) run them side by side; with one, they change places often.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import ktk
from ktk import _core
from ktk.pool import MadeOnce

EXPERTS, HIDDEN, WIDTH, TOP_K, TOKENS = 4, 128, 64, 2, 6
THREADS = 4
ROUNDS = 25


@pytest.fixture(autouse=True)
def _often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[int], None]) -> None:
    """Run work(0), work(1) ... in threads that start together; raise what one of them raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        try:
            start.wait()
            for _ in range(ROUNDS):
                work(thread)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def experts(seed: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    shapes = (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    return [[rng.standard_normal(s, np.float32) / 8 for s in shapes] for _ in range(EXPERTS)]


def loaded_layer(pool: ktk.WorkerPool | None = None) -> ktk.MoE:
    layer = ktk.load_backend("BF16").moe(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        pool=pool or ktk.WorkerPool(2, pin=False),
    )
    for expert, weights in enumerate(experts(0)):
        layer.load_expert(expert, *weights)
    return layer


def arrays(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + seed)
    ids = np.stack([rng.permutation(EXPERTS)[:TOP_K] for _ in range(TOKENS)])
    return (
        rng.standard_normal((TOKENS, HIDDEN), np.float32),
        ids,
        rng.random((TOKENS, TOP_K), np.float32),
    )


def test_calls_of_one_layer() -> None:
    layer = loaded_layer()
    calls = [arrays(seed) for seed in range(THREADS)]
    wanted = [layer(*call) for call in calls]
    layer.reset_counts()

    def work(thread: int) -> None:
        np.testing.assert_array_equal(layer(*calls[thread]), wanted[thread])

    at_once(work)
    chosen = np.bincount(np.concatenate([ids.ravel() for _, ids, _ in calls]), minlength=EXPERTS)
    np.testing.assert_array_equal(layer.counts, ROUNDS * chosen)


def test_layers_of_one_pool() -> None:
    pool = ktk.WorkerPool(2, pin=False)
    layers = [loaded_layer(pool) for _ in range(THREADS)]
    call = arrays(0)
    wanted = layers[0](*call)

    def work(thread: int) -> None:
        np.testing.assert_array_equal(layers[thread](*call), wanted)

    at_once(work)


def test_experts_that_are_loaded_while_others_call() -> None:
    """A call meets an expert as it was, as it is, or not at all, and never a part of it."""
    layer = loaded_layer()
    hidden, _, weights = arrays(0)
    ids = np.zeros((TOKENS, TOP_K), np.int64)
    ids[:, 1] = 1
    first, second = experts(0)[0], experts(1)[0]
    outputs = []
    for weight in (second, first):
        layer.load_expert(0, *weight)
        outputs.append(layer(hidden, ids, weights))
    seen: set[str] = set()

    def work(thread: int) -> None:
        if thread == 0:
            layer.load_expert(0, *second)
            layer.unload_expert(0)
            layer.load_expert(0, *first)
        elif thread == 1:
            assert set(layer.loaded) >= {1, 2, 3}
            assert layer.nbytes in (
                layer.expert_nbytes * EXPERTS,
                layer.expert_nbytes * (EXPERTS - 1),
            )
        else:
            try:
                found = layer(hidden, ids, weights)
            except RuntimeError as error:
                seen.add(str(error))
            else:
                assert any(np.array_equal(found, output) for output in outputs)

    at_once(work)
    assert all(sentence.startswith("expert 0 is not loaded") for sentence in seen)
    assert np.array_equal(layer(hidden, ids, weights), outputs[1])


def test_unpacking_while_others_load() -> None:
    layer = loaded_layer()
    wanted = [layer.unpack_expert(0)[1]]
    layer.load_expert(0, *experts(1)[0])
    wanted.append(layer.unpack_expert(0)[1])

    def work(thread: int) -> None:
        if thread < 2:
            layer.load_expert(0, *experts(thread)[0])
        else:
            up = layer.unpack_expert(0)[1]
            assert any(np.array_equal(up, one) for one in wanted)

    at_once(work)


def test_tickets_that_several_wait_for() -> None:
    layer = loaded_layer()
    call = arrays(0)
    wanted = layer(*call)
    shared: list[ktk.Ticket] = [layer.submit(*call)]

    def work(thread: int) -> None:
        ticket = shared[0]  # perhaps the one before the last
        if thread == 0:
            shared[0] = layer.submit(*call)
        elif thread == 1:
            assert ticket.done in (False, True)
            layer.submit(*call)  # nobody waits for this one
        np.testing.assert_array_equal(ticket.wait(), wanted)

    at_once(work)


def test_dense_layers_that_share_an_input() -> None:
    rng = np.random.default_rng(0)
    pool = ktk.WorkerPool(2, pin=False)
    backend = ktk.load_backend("BF16")
    weights = [rng.standard_normal((HIDDEN, HIDDEN), np.float32) for _ in range(THREADS)]
    layers = [ktk.Linear(backend, HIDDEN, HIDDEN, pool=pool).load(weight) for weight in weights]
    x = rng.standard_normal((1, HIDDEN), np.float32)
    wanted = [layer(x) for layer in layers]
    grads = [layer.backward(x) for layer in layers]

    def work(thread: int) -> None:
        np.testing.assert_array_equal(layers[thread](x), wanted[thread])
        np.testing.assert_array_equal(layers[thread].backward(x), grads[thread])
        np.testing.assert_array_equal(layers[0](x), wanted[0])

    at_once(work)


def test_training_of_one_layer() -> None:
    layer = loaded_layer()
    calls = [tuple(map(torch.from_numpy, arrays(seed))) for seed in range(THREADS)]

    def train(thread: int) -> list[torch.Tensor]:
        out, saved = layer.forward_train(*calls[thread])
        grads = layer.backward(out, *calls[thread], saved=saved)
        return [out, grads.hidden, grads.topk_weights]

    wanted = [train(thread) for thread in range(THREADS)]

    def work(thread: int) -> None:
        for found, expected in zip(train(thread), wanted[thread], strict=True):
            assert torch.equal(found, expected)

    at_once(work)


def test_settings_that_change_no_bits() -> None:
    layer = loaded_layer()
    call = arrays(0)
    wanted = layer(*call)

    def work(thread: int) -> None:
        if thread == 0:
            _core.set_prefetch("few=4096:l1")
            _core.set_prefetch("")
        assert "few" in _core.prefetch()
        np.testing.assert_array_equal(layer(*call), wanted)

    at_once(work)


def test_pools_that_come_and_go() -> None:
    call = arrays(0)
    wanted = loaded_layer()(*call)

    def work(_: int) -> None:
        np.testing.assert_array_equal(loaded_layer()(*call), wanted)

    at_once(work)


def test_backends_that_are_opened_at_once() -> None:
    """In a new process, where none was opened: all threads get the same objects."""
    code = """
import threading, ktk
start, found = threading.Barrier(4), []
def opened(name):
    try:
        return ktk.load_backend(name)
    except ktk.BackendError as error:
        return str(error)
def work():
    start.wait()
    found.append({name: opened(name) for name in ktk.backends()})
threads = [threading.Thread(target=work) for _ in range(4)]
for t in threads: t.start()
for t in threads: t.join()
assert len(found) == 4, found
for name, one in found[0].items():
    assert all(other[name] is one or isinstance(one, str) and other[name] == one for other in found)
assert any(isinstance(one, ktk.Backend) for one in found[0].values())
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.skipif(
    not sysconfig.get_config_var("Py_GIL_DISABLED"), reason="this build of Python has a lock"
)
def test_modules_do_without_the_lock() -> None:
    """CPython switches its lock on, with a warning, where a module does not say that."""
    code = """
import sys
import numpy, torch
assert not sys._is_gil_enabled(), "numpy or torch wants the lock"
import ktk
for name in ktk.backends():
    try:
        ktk.load_backend(name)
    except ktk.BackendError:  # a library, or a CPU that has its instructions, is not here
        pass
    assert not sys._is_gil_enabled(), name
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_pool_is_made_once_whoever_asks_first() -> None:
    made = []

    @MadeOnce
    def make(number: int) -> object:
        time.sleep(0.01)  # as a pool with many workers
        made.append(number)
        return object()

    start, found = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        found.append(make(3))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert made == [3]
    assert len(set(map(id, found))) == 1
    make.forget()
    assert make(3) is not found[0]


@pytest.mark.slow
def test_exports_while_finalizers_run() -> None:
    """Whatever the collector runs while arrays are made may ask for the same weight."""
    code = """
import faulthandler, gc, threading, time
import torch, ktk
faulthandler.dump_traceback_later(60, exit=True)
layer = ktk.Linear("BF16", 64, 64).load(torch.randn(64, 64))
class Cycle:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.00001)  # lets another thread go on
gc.set_threshold(30)
end = time.monotonic() + 1.5
def work():
    while time.monotonic() < end:
        Cycle()
        for _ in range(5):
            layer._core.exported()
            layer._core.bias()
threads = [threading.Thread(target=work) for _ in range(2)]
for one in threads: one.start()
for one in threads: one.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
