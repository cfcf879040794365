"""Kills conversions with SIGKILL at every system call that changes a file, and resumes each.

    kill_at.py SOURCE FOLDER BACKEND
    kill_at.py SOURCE FOLDER FORMAT

The first packs experts, the second writes a checkpoint, in files of 100 kB at most.

Run as a program of its own, because it forks, which a process with threads must not. Prints the
number of calls.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ktk.conversion import convert
from ktk.conversion.compressed import TARGETS, convert_checkpoint

CALLS = ("posix_fallocate", "pwrite", "fsync", "replace")


def make(source: Path, output: Path, what: str, **options: Any) -> None:
    """Convert to a format, or for a backend."""
    if what in TARGETS:
        convert_checkpoint(source, output, to=what, shard_nbytes=100_000, **options)
    else:
        convert(source, output, backend=what, **options)


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked process; returns how that ended."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def convert_dying(source: Path, output: Path, what: str, last: int) -> None:
    """Convert, and die in the call with the number `last`, half of its data written."""
    made = 0

    def dying(name: str) -> Callable[..., Any]:
        real = getattr(os, name)

        def call(*arguments: Any) -> Any:
            nonlocal made
            made += 1
            if made == last:
                if name == "pwrite":
                    fd, data, offset = arguments
                    real(fd, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments)

        return call

    for name in CALLS:
        setattr(os, name, dying(name))
    # Threads would make the order of calls, and so the number, differ from run to run.
    make(source, output, what, threads=1, resume=output.exists())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check(source: Path, output: Path, what: str, last: int, expected: dict[str, bytes]) -> bool:
    """Die in one call, resume; returns False where there are not that many."""
    status = in_child(lambda: convert_dying(source, output, what, last))
    if status == 0:
        return False
    assert os.WIFSIGNALED(status), f"call {last}: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL, f"call {last}: status {status}"
    for path in output.glob("*.safetensors"):
        assert path.read_bytes() == expected[path.name], f"call {last}: {path.name} is unfinished"
    status = in_child(lambda: make(source, output, what, resume=True))
    assert status == 0, f"call {last}: resuming failed"
    assert contents(output) == expected, f"call {last}: other files after resuming"
    shutil.rmtree(output)
    return True


def main() -> None:
    source, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    # In this process, so that children need not import and look up everything again.
    make(source, folder / "expected", what)
    assert threading.active_count() == 1, "a process with threads is not to be forked"
    expected = contents(folder / "expected")
    calls = 0
    while check(source, folder / "killed", what, calls + 1, expected):
        calls += 1
    print(calls)


if __name__ == "__main__":
    main()
