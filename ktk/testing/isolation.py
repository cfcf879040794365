"""Runs each property in a process of its own: what a backend does to it ends no other property.

The child is a fork of pytest, which costs milliseconds. Workers of ktk do not survive a fork, and
there are none: only properties start them. A child leaves notes in files that outlive it: the
example that it tries, and where in Python it was when a signal ended it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import inspect
import itertools
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import warnings
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import IO, Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Verbosity, given, reporting, settings
from hypothesis import strategies as st

from ktk.testing import strategies

#: Seconds between two looks at a child that is silent.
PATIENCE = 0.25
#: What signals mean where a backend computes.
MEANINGS = {
    "SIGSEGV": "memory was touched that is not there",
    "SIGBUS": "memory was touched that is not there",
    "SIGFPE": "an integer was divided by zero",
    "SIGILL": "this CPU lacks an instruction",
    "SIGABRT": "abort(), an assertion, a C++ exception that nobody caught, or a damaged heap",
}


class Notes:
    """What a child has to say, in a file that its parent can read when the child is gone."""

    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def example(self, text: object) -> None:
        """Hear what Hypothesis says in its verbose mode: a new example, then what it draws."""
        if str(text).startswith("Test case:"):
            self.file.seek(0)
            self.file.truncate()
            self.file.write(b"\n")  # a note, too
        else:
            self.file.write(f"{text}\n".encode(errors="replace"))

    @property
    def state(self) -> tuple[int, int]:
        """Something that differs after each note."""
        stat = os.fstat(self.file.fileno())
        return stat.st_mtime_ns, stat.st_size

    @property
    def text(self) -> str:
        """All of it."""
        size = os.fstat(self.file.fileno()).st_size
        return os.pread(self.file.fileno(), size, 0).decode(errors="replace").strip()


@functools.cache
def _prepare() -> None:
    """Do once what every child would have to do for itself."""

    @settings(max_examples=1, database=None, verbosity=Verbosity.quiet)
    @given(st.data())
    def draws(data: st.DataObject) -> None:
        data.draw(strategies.matrices((1, 1)))

    draws()  # Hypothesis looks through all objects when it first meets numpy
    gc.collect()
    gc.freeze()  # a collection in a child would copy what it only looks at


def run(item: pytest.Item, limit: float) -> list[pytest.TestReport]:
    """Run one test in a child, which may take ``limit`` seconds for an example."""
    _prepare()
    examples, trace = Notes(), Notes()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_run_in_child, args=(item, examples, trace, sender))
    started = time.monotonic()
    with warnings.catch_warnings():
        # Threads of other libraries hold no locks between two tests.
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    sender.close()
    try:
        in_time = _wait(receiver, examples, limit)
        reports = receiver.recv_bytes() if in_time else None
    except EOFError:
        reports = None
    finally:
        _end(child)
        receiver.close()
    if reports is None:
        why = _cause(child.exitcode) if in_time else f"An example took longer than {limit:g} s"
        return [_crash(item, why, examples.text, trace.text, time.monotonic() - started)]
    restore = item.config.hook.pytest_report_from_serializable
    return [restore(config=item.config, data=data) for data in pickle.loads(reports)]


def _wait(receiver: Connection, examples: Notes, limit: float) -> bool:
    """Wait for reports or the end of the child. False: it is busy with one example for too long."""
    state, since = examples.state, time.monotonic()
    while not receiver.poll(PATIENCE):
        if examples.state != state:
            state, since = examples.state, time.monotonic()
        elif time.monotonic() - since > limit:
            return False
    return True


def _end(child: BaseProcess) -> None:
    """Wait until a child is gone; one that does not go by itself says where it is."""
    child.join(PATIENCE)
    if child.exitcode is None:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGABRT)
        child.join(PATIENCE)
    if child.exitcode is None:
        child.kill()
    child.join()


def _run_in_child(item: pytest.Item, examples: Notes, trace: Notes, sender: Connection) -> None:
    faulthandler.enable(trace.file, all_threads=False)
    item.stash[_EXAMPLES] = examples
    reports = runtestprotocol(item, log=False, nextitem=None)
    save = item.config.hook.pytest_report_to_serializable
    sender.send_bytes(pickle.dumps([save(config=item.config, report=r) for r in reports]))


_EXAMPLES = pytest.StashKey[Notes]()


def noting(item: pytest.Item) -> contextlib.AbstractContextManager[None]:
    """Return a context for the function of a test in which examples are noted, in a child."""
    if _EXAMPLES not in item.stash:
        return contextlib.nullcontext()
    return reporting.with_reporter(item.stash[_EXAMPLES].example)


def _cause(exitcode: int | None) -> str:
    """Say how a process ended that should have sent reports."""
    if exitcode is None or exitcode >= 0:
        return f"the process ended with status {exitcode}"
    name = signal.Signals(-exitcode).name
    return f"{name}: {MEANINGS.get(name, signal.strsignal(-exitcode))}"


def _shortened(trace: str) -> str:
    """Keep of a stack what the property called."""
    frames = [line for line in trace.splitlines() if line.startswith("  File")]
    own = itertools.takewhile(lambda line: "/hypothesis/" not in line, frames)
    return "\n".join(own)


def _crash(
    item: pytest.Item, why: str, example: str, trace: str, seconds: float
) -> pytest.TestReport:
    """Return the report of a test whose process is gone."""
    assert isinstance(item, pytest.Function)
    parts = [
        why,
        f"The property:\n{inspect.cleandoc(item.function.__doc__ or '')}",
        f"The example was:\n{example}" if example else "It had tried no example.",
        f"It came from:\n{_shortened(trace)}" if trace else "",
        "Run it with --ktk-no-isolation under a debugger to see more.",
    ]
    capture: Any = item.config.pluginmanager.getplugin("capturemanager")
    said = capture.read_global_capture() if capture and capture.is_globally_capturing() else None
    return pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome="failed",
        longrepr="\n\n".join(part for part in parts if part),
        when="call",
        sections=[("Captured stderr", said.err)] if said and said.err else [],
        duration=seconds,
    )
