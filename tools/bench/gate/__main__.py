"""Compare the speed of two builds of ktk, and fail where the new one loses more than 5 %.

python tools/bench/gate OLD NEW      # Pythons of two environments, each with its own ktk

Both stay loaded and take turns, old new and new old, in each cell: a backend and a number of
tokens. Exit status 0: nothing is lost; 1: a cell has lost more, or a backend that the old build
has; 2: nothing was compared, or a build does not answer; 3: a cell is undecided.

Where the CPU counts instructions, new / old of a call's is printed too. That ratio
judges nothing: a call may take more instructions and less time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gate.decide import LOOKS, Verdict, decide

Sample = Callable[[], "float | None"]


class Build:
    """A process with one of the builds."""

    def __init__(self, python: str, arguments: Sequence[str]) -> None:
        command = [python, str(Path(__file__).with_name("worker.py")), *arguments]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        except OSError as error:
            raise RuntimeError(f"{python} cannot be started: {error.strerror}") from error
        self._python = python
        #: Of a call, in samples of the cell that is measured; empty where they are not counted.
        self.instructions: list[float] = []

    def sample(self, backend: str, tokens: int, seconds: float) -> float | None:
        """Return the seconds of a call; None where the backend cannot run."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            print(json.dumps([backend, tokens, seconds]), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self._python} ended with status {self._process.wait()}")
        try:
            found: tuple[float, float | None] | None = json.loads(line)
        except ValueError:
            raise RuntimeError(f"{self._python} answers {line[:60]!r}") from None
        if found is None:
            return None
        seconds_of_a_call, instructions = found
        if instructions is not None:
            self.instructions.append(instructions)
        return seconds_of_a_call

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        with suppress(BrokenPipeError):  # a question that it never read
            self._process.stdin.close()
        self._process.wait()


def compare(old: Sample, new: Sample, loss: float) -> Verdict | None:
    """Sample a cell by turns until it is decided; None where the old build cannot compute it."""
    if old() is None:  # also loads weights
        return None
    if new() is None:
        return Verdict("fails", math.inf, math.inf, math.inf)
    ratios: list[float] = []
    for look in LOOKS:
        while len(ratios) < look:
            if len(ratios) % 2:
                after, before = new(), old()
            else:
                before, after = old(), new()
            assert before
            assert after
            ratios.append(after / before)
        verdict = decide(ratios, loss=loss)
        if verdict.state != "undecided":
            break
    return verdict


def executed(old: Sequence[float], new: Sequence[float]) -> str:
    """Say what the instructions of a call became, if both builds' were counted."""
    if not old or not new:
        return ""
    return f"; instructions {statistics.median(new) / statistics.median(old):.3f}"


def counts(text: str) -> list[int]:
    """Read numbers of tokens: "1,8"."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"wants at least one token, got {text!r}")
    return found


def status(states: set[str]) -> int:
    """Return the exit status of cells of which these were found."""
    for state, found in (("fails", 1), ("undecided", 3), ("passes", 0)):
        if state in states:
            return found
    return 2


def main(arguments: Sequence[str]) -> int:
    """Print a line for each cell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", help="Python with the ktk that was there before")
    parser.add_argument("new", help="Python with the ktk that is to be judged")
    parser.add_argument("-b", "--backend", action="append", metavar="NAME")
    parser.add_argument("--tokens", type=counts, default="1,8,128", metavar="T,T")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--experts", default="0", help="fewer, to fit memory twice")
    parser.add_argument("--threads", default="0", help="workers; 0: all physical cores")
    parser.add_argument("--seconds", type=float, default=0.03, help="length of a sample")
    parser.add_argument("--loss", type=float, default=0.05, help="default: %(default)s")
    options = parser.parse_args(arguments)
    backends = options.backend or ["BF16", "AMXINT8", "AMXINT4", "FP8", "MXFP4", "RAWINT4"]
    states: set[str] = set()
    for backend in backends:
        common = [options.shape, options.experts, options.threads]
        with ExitStack() as stack:
            builds = [
                stack.enter_context(closing(Build(python, common)))
                for python in (options.old, options.new)
            ]
            for tokens in options.tokens:
                for build in builds:
                    build.instructions.clear()
                old, new = (partial(b.sample, backend, tokens, options.seconds) for b in builds)
                verdict = compare(old, new, options.loss)
                said = f"{verdict or 'cannot run here'}"
                said += executed(*(build.instructions for build in builds))
                print(f"{backend}, {tokens} tokens: {said}", flush=True)
                if verdict:
                    states.add(verdict.state)
    if not states:
        print("gate: nothing was compared", file=sys.stderr)
    return status(states)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except RuntimeError as error:
        print(f"gate: {error}", file=sys.stderr)
        sys.exit(2)
