"""Does one thing over and over, each time with another call that fails.

    LD_PRELOAD=shim.so python fail_each.py convert|load|call KIND SOURCE FOLDER MOST

Each attempt is a forked process. What failed is done once more after it, in the same process where
that goes on, and must then end as if nothing had been. Prints, for each attempt, the number of the
call and the sentence; and at the end how many calls of the kind there are.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import ktk
from ktk.conversion import convert
from ktk.errors import CheckpointError

KINDS = ("new", "map", "open", "read", "write", "sync", "rename", "thread")
# The errors that a caller can expect of memory, files and threads that run out.
EXPECTED = (CheckpointError, MemoryError, OSError, RuntimeError)
# One call that fails, and that nobody forgot to give up waiting for.
SECONDS = 60

shim = ctypes.CDLL(None)
shim.fault_calls.restype = ctypes.c_long


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


class Attempt:
    """Runs something with a call that fails."""

    def __init__(self, kind: str, number: int) -> None:
        self.kind, self.number = KINDS.index(kind) + 1, number
        self.sentence = ""

    def __call__(self, work: Callable[[], object]) -> bool:
        """Return whether it succeeded all the same."""
        try:
            shim.fault_arm(self.kind, ctypes.c_long(self.number))
            try:
                work()
            finally:
                self.calls = shim.fault_calls()
        except EXPECTED as error:
            self.sentence = f"{type(error).__name__}: {error}"
            return False
        return True


def do_convert(attempt: Attempt, source: Path, folder: Path) -> None:
    """Convert with a fault, and go on: the files are those of a conversion without one."""
    before, output = contents(source), folder / "output"
    shutil.rmtree(output, ignore_errors=True)

    def make() -> None:
        convert(source, output, backend="AMXINT8", threads=2, resume=True)

    done = attempt(make)
    expected = contents(folder / "expected")
    for path in output.glob("layer-*.safetensors"):
        assert path.read_bytes() == expected[path.name], f"{path.name} is there and not whole"
    if not done:
        make()
    assert contents(output) == expected
    assert contents(source) == before


def new_pool() -> ktk.WorkerPool:
    return ktk.WorkerPool(threads=2)


def compute(moe: ktk.MoE) -> torch.Tensor:
    """Call a layer directly, and let it compute without waiting."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, moe.config.hidden_size, generator=generator)
    ids = torch.randint(0, moe.config.num_experts, (9, 2), generator=generator)
    weights = torch.rand(9, 2, generator=generator)
    later = moe.submit(x, ids, weights).wait()
    now: torch.Tensor = moe(x, ids, weights)
    assert torch.equal(later, now)
    return now


def load(source: Path) -> ktk.MoE:
    return ktk.MoE.from_checkpoint(source, layer=0, backend="AMXINT8", pool=new_pool())


def do_load(attempt: Attempt, source: Path, folder: Path) -> None:
    """Load with a fault, and again in the same process."""
    attempt(lambda: load(source))
    assert torch.equal(compute(load(source)), torch.load(folder / "expected.pt"))


def do_call(attempt: Attempt, source: Path, folder: Path) -> None:
    """Call with a fault, and again."""
    moe = load(source)
    attempt(lambda: compute(moe))
    assert torch.equal(compute(moe), torch.load(folder / "expected.pt"))


def prepare(source: Path, folder: Path) -> None:
    """Make what is expected, which also imports all that there is to import."""
    convert(source, folder / "expected", backend="AMXINT8", threads=2)
    torch.save(compute(load(source)), folder / "expected.pt")


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked process, for so many seconds at most; returns how that ended."""
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(SECONDS)
        status = 1
        try:
            work()
            status = 0
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stderr.flush()
            sys.stdout.flush()
            os._exit(status)
    return os.waitpid(pid, 0)[1]


def main() -> None:
    doing, kind, source, folder, most = sys.argv[1:]
    work = {"convert": do_convert, "load": do_load, "call": do_call}[doing]
    shim.fault_watch(str(Path(source).parent).encode())

    def one(number: int) -> None:
        attempt = Attempt(kind, number)
        work(attempt, Path(source), Path(folder))
        what = {"call": number, "sentence": attempt.sentence, "calls": attempt.calls}
        print(json.dumps(what), flush=True)

    torch.set_num_threads(1)
    torch.manual_seed(0)
    assert in_child(lambda: prepare(Path(source), Path(folder))) == 0
    assert threading.active_count() == 1, "a process with threads is not to be forked"
    # How many there are; then some of them, from the first to the last.
    reader, writer = os.pipe()

    def count() -> None:
        attempt = Attempt(kind, -1)
        work(attempt, Path(source), Path(folder))
        os.write(writer, str(attempt.calls).encode())

    assert in_child(count) == 0
    calls = int(os.read(reader, 100) or b"0")
    tried = min(calls, int(most))
    for number in (i * calls // tried for i in range(tried)):
        status = in_child(partial(one, number))
        # nanobind keeps its tables of objects in functions that may not throw.
        if kind == "new" and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGABRT:
            print(json.dumps({"call": number, "aborted": True}), flush=True)
            continue
        assert status == 0, f"call {number} of {calls}: status {status}"
    print(json.dumps({"all": calls}))


if __name__ == "__main__":
    main()
