"""A child of fork() gets a sentence at once, whatever its parent was doing; nothing in it hangs."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import ktk
from ktk import _core

E, K, H, I = 4, 4, 256, 512  # noqa: E741
#: Enough tokens that a call outlasts a fork and the start of its child by far.
TOKENS = 12_000
SENTENCE = "do not survive fork(); make a new WorkerPool after fork()"
PATIENCE = 20.0  # seconds until a child counts as hanging

pytestmark = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


class Parent:
    """What a parent has when it forks, and what it is doing at that moment."""

    def __init__(self) -> None:
        self.pool = ktk.WorkerPool(threads=2)
        backend = ktk.load_backend("BF16")
        self.moe = backend.moe(
            num_experts=E,
            num_experts_per_tok=K,
            hidden_size=H,
            intermediate_size=I,
            pool=self.pool,
            variant=backend.variants[-1].name,  # the slowest
        )
        rng = np.random.default_rng(0)
        shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
        self.expert: dict[str, Any] = {
            n: rng.standard_normal(s, np.float32) / 16 for n, s in shapes.items()
        }
        for expert in range(E):
            self.moe.load_expert(expert, **self.expert)
        self.few, self.many = self.inputs(2), self.inputs(TOKENS)
        self.ticket: ktk.Ticket | None = self.moe.submit(*self.few)
        self.ticket.wait()
        self.call: _core.AsyncCall | None = self.stream_call(self.few)
        self.job: _core.Job | None = None
        self.thread: threading.Thread | None = None

    def inputs(self, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ids = np.tile(np.arange(K), (tokens, 1))
        return np.ones((tokens, H), np.float32), ids, np.ones((tokens, K), np.float32)

    def stream_call(self, inputs: tuple[np.ndarray, np.ndarray, np.ndarray]) -> _core.AsyncCall:
        out = np.empty_like(inputs[0])
        errors = _core.Latch()
        return _core.AsyncCall(self.moe._core, *inputs, None, out, errors, name="layer", live=True)

    def write(self) -> _core.Job:
        """Queue what KTMoEWrapper writes for a GPU: here two matrices in this process."""
        self.written = np.zeros(3 * H * I, np.uint16)
        w13, w2 = self.written.ctypes.data, self.written[2 * H * I :].ctypes.data
        return _core.submit_write(self.moe._core, 0, [(w13, 0, w2, 0)], False)

    def busy(self) -> bool:
        """Whether the parent was still at it after the fork, so that the test means something."""
        if self.thread is not None:
            return self.thread.is_alive()
        return self.call is None or not self.call.done


def in_a_thread(parent: Parent, body: Callable[[], Any]) -> None:
    parent.thread = threading.Thread(target=body)
    parent.thread.start()
    time.sleep(0.05)  # it is inside


def idle(parent: Parent) -> None:
    pass


def queued(parent: Parent) -> None:
    """A ticket, a stream's call and a job wait in the queue, and something is computed."""
    parent.ticket = parent.moe.submit(*parent.many)
    parent.call = parent.stream_call(parent.many)
    parent.call.start()
    parent.job = parent.write()


def waited_for(parent: Parent) -> None:
    """As before, and a thread waits for the ticket."""
    queued(parent)
    assert parent.ticket is not None
    in_a_thread(parent, parent.ticket.wait)


def computing(parent: Parent) -> None:
    """A thread is inside a call."""
    in_a_thread(parent, lambda: parent.moe(*parent.many))


def loading(parent: Parent) -> None:
    """A thread loads experts, again and again."""
    until = time.monotonic() + 1

    def load() -> None:
        while time.monotonic() < until:
            parent.moe.load_expert(1, **parent.expert)

    in_a_thread(parent, load)


STATES = [idle, queued, waited_for, computing, loading]
#: States of which the fast set has the first.
BUSY = [idle, *(pytest.param(state, marks=pytest.mark.slow) for state in STATES[1:])]


def drop(parent: Parent) -> None:
    """Let go of all: as the end of an interpreter does."""
    parent.ticket = parent.call = parent.job = None
    del parent.moe, parent.pool
    gc.collect()


def submit_and_drop(parent: Parent) -> None:
    parent.moe.submit(*parent.few)


def start_on_a_new_call(parent: Parent) -> None:
    parent.stream_call(parent.few).start()


def write(parent: Parent) -> None:
    parent.write()


#: What a child does, and whether that ends in the sentence.
ACTIONS: dict[str, tuple[Callable[[Parent], Any], bool]] = {
    "call": (lambda p: p.moe(*p.few), True),
    "submit": (lambda p: p.moe.submit(*p.few), True),
    "submit_and_drop": (submit_and_drop, True),
    "load": (lambda p: p.moe.load_expert(0, **p.expert), True),
    "leave_out": (lambda p: p.moe.leave_out(0), True),
    "unload": (lambda p: p.moe.unload_expert(0), True),
    "reset_counts": (lambda p: p.moe.reset_counts(), True),
    "counts": (lambda p: p.moe.counts.sum(), False),
    "drain": (lambda p: _core.drain(p.pool), True),
    "wait": (lambda p: p.ticket.wait(), True),  # type: ignore[union-attr]
    "done": (lambda p: p.ticket.done, True),  # type: ignore[union-attr]
    "start": (lambda p: p.call.start(), True),  # type: ignore[union-attr]
    "start_a_new_call": (start_on_a_new_call, True),
    "wait_for_the_call": (lambda p: p.call.wait(all=True), True),  # type: ignore[union-attr]
    "write": (write, True),
    "drop": (drop, False),
    "size": (lambda p: p.pool.size, False),
}


#: Of which the fast set has a call that is refused and a drop that is not.
ONE_OF_EACH = [
    name if name in ("call", "drop") else pytest.param(name, marks=pytest.mark.slow)
    for name in ACTIONS
]


def in_child(body: Callable[[], Any]) -> str:
    """Fork, run `body` in the child, and return what became of it."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            body()
            result = "fine"
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
        os.write(writer, result.encode())
        os._exit(0)
    os.close(writer)
    try:
        if not select.select([reader], [], [], PATIENCE)[0]:
            return "hangs"
        return os.read(reader, 10_000).decode() or "killed"
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


@pytest.fixture
def parent() -> Iterator[Parent]:
    made = Parent()
    # A child that collects what it dropped looks at that, and not at all that pytest has made: the
    # parent is to be busy still when the child is done.
    gc.collect()
    gc.freeze()
    yield made
    gc.unfreeze()
    if made.thread is not None:
        made.thread.join()


@pytest.mark.parametrize("action", ONE_OF_EACH)
@pytest.mark.parametrize("state", BUSY, ids=lambda state: state.__name__)
def test_a_child_gets_an_answer(
    parent: Parent, state: Callable[[Parent], None], action: str
) -> None:
    body, refused = ACTIONS[action]
    state(parent)
    result = in_child(lambda: body(parent))
    assert state is idle or parent.busy(), "the parent was done too early for this test"
    if refused:
        assert SENTENCE in result
    else:
        assert result == "fine"


@pytest.mark.parametrize("state", BUSY, ids=lambda state: state.__name__)
def test_what_a_child_reads_is_there_or_refused(
    parent: Parent, state: Callable[[Parent], None]
) -> None:
    state(parent)
    body = lambda: parent.moe.unpack_expert(0)  # noqa: E731
    result = in_child(lambda: (body(), repr(parent.moe)))
    if state is loading:  # an expert may be half written
        assert result == "fine" or SENTENCE in result
    else:
        assert result == "fine"


@pytest.mark.slow
def test_a_childs_worker_of_an_engine_has_a_pool_of_its_own() -> None:
    code = """
import os, numpy as np, ktk
from ktk.hosts.pool import worker_pool
worker_pool(0, 1)
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
ktk.Linear("BF16", 64, 64, pool=worker_pool(0, 1)).load(np.ones((64, 64), np.float32))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_child_makes_a_pool_of_its_own(parent: Parent) -> None:
    computing(parent)

    def work() -> None:
        own = Parent()
        expected = own.moe(*own.few)
        np.testing.assert_array_equal(own.moe.submit(*own.few).wait(), expected)

    assert in_child(work) == "fine"


EXIT = """
import os, signal, sys, test_fork
parent = test_fork.Parent()
test_fork.{state}(parent)
child = os.fork()
if child == 0:
    signal.alarm(30)  # if it hangs
    sys.exit(7)
status = os.waitpid(child, 0)[1]
print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("state", BUSY, ids=lambda state: state.__name__)
def test_a_child_exits_normally(state: Callable[[Parent], None]) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EXIT.format(state=state.__name__)],
        env=os.environ | {"PYTHONPATH": os.path.dirname(__file__)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.split() == ["7"], done.stderr
