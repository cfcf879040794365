"""Time dense layers against the limits of this machine, in alternation as `ktk bench` does.

python tools/bench/linear.py --size 4096,2048 -b AMXINT8 -b LLAMAFILE:q4_k --tokens 1,8
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

import ktk
from ktk.bench.limits import LimitProbe, Limits, roofline, units_of
from ktk.bench.machine import check_threads, undisturbed
from ktk.bench.verdict import doubt
from ktk.bench.weights import choose_format, recipe
from ktk.formats import label
from ktk.system import last_level_cache_bytes

DEFAULT = ["BF16", "AMXINT8", "AMXINT4", "LLAMAFILE:q8_0", "LLAMAFILE:q6_k", "LLAMAFILE:q4_k"]
DEFAULT_SIZES = ["2048,2048", "4096,2048", "2048,4096"]  # n, k


class Candidate:
    """Layers of one backend and format, as many as memory must be read for."""

    def __init__(
        self, subject: str, n: int, k: int, rotated_bytes: int, pool: ktk.WorkerPool
    ) -> None:
        name, _, text = subject.partition(":")
        backend = ktk.load_backend(name)
        made = recipe(backend, choose_format(backend, name, text or None))
        # A head has as many rows as memory holds: blocks of rows are repeated.
        rows = min(n, 8192)
        part = torch.randn(rows, k, generator=torch.Generator().manual_seed(0)).bfloat16()
        matrix = made.matrix(part / k**0.5, None, 1)
        last = made.matrix(part[: n % rows] / k**0.5, None, 1) if n % rows else None
        parts = [matrix] * (n // rows) + ([last] if last else [])

        def load() -> ktk.Linear:
            linear = backend.linear(k, n, pool=pool, weight_format=made.stored)
            return linear.load(parts)

        self.layers = [load()]
        count = max(2, -(-rotated_bytes // self.layers[0].nbytes))
        self.layers += [load() for _ in range(count - 1)]
        self.nbytes = self.layers[0].nbytes
        self.name = f"{backend.name}/{self.layers[0].variant} {label(made.stored)}"
        self.units = units_of(backend, self.layers[0].variant, made.stored, n, k)

    def turn(self, seconds: float, x: torch.Tensor, out: torch.Tensor) -> float:
        """Return the median time of calls, each of the layer that was not used for longest."""
        times: list[float] = []
        end = time.perf_counter() + seconds
        while len(times) < 2 or time.perf_counter() < end:
            layer = self.layers.pop(0)
            self.layers.append(layer)
            begin = time.perf_counter()
            layer(x, out=out)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)


def measure(
    candidates: Sequence[Candidate], n: int, k: int, tokens: int, probe: LimitProbe, options: Any
) -> Iterator[dict[str, Any]]:
    """Yield a result for each candidate."""
    x = torch.randn(tokens, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty(tokens, n, dtype=torch.bfloat16)
    seconds: dict[int, list[float]] = {id(candidate): [] for candidate in candidates}
    reads: list[float] = []
    others: list[float] = []
    peaks: dict[str, list[float]] = {unit: [] for one in candidates for unit in one.units}

    def look() -> None:
        seen = undisturbed(partial(probe.read, options.seconds), noise=options.noise)
        reads.append(seen.value)
        others.append(seen.others)
        for unit, found in peaks.items():
            found.append(probe.peak(unit, options.seconds / 4))

    look()
    for candidate in candidates:
        candidate.turn(0, x, out)
    for _ in range(options.rounds):
        for candidate in candidates:
            turn = undisturbed(
                partial(candidate.turn, options.seconds, x, out), noise=options.noise
            )
            seconds[id(candidate)].append(turn.value)
            others.append(turn.others)
        look()
    limits = Limits(
        probe.threads,
        statistics.median(reads),
        {unit: statistics.median(found) for unit, found in peaks.items()},
    )
    for candidate in candidates:
        took = statistics.median(seconds[id(candidate)])
        flops = 2.0 * tokens * n * k
        limit = roofline(limits, nbytes=candidate.nbytes, flops=flops, units=candidate.units)
        fraction = limit.fraction(took)
        # Without a unit that can be measured, memory binds.
        fastest = max(candidate.units, key=lambda unit: limits.peak([unit]), default="")
        seen = reads if limit.bound == "memory" else peaks[fastest]
        why = doubt(fraction, limits=seen, others=others, noise=options.noise)
        yield {
            "layer": candidate.name,
            "size": [n, k],
            "tokens": tokens,
            "threads": probe.threads,
            "packed_mb": candidate.nbytes / 1e6,
            "us": took * 1e6,
            "gb_per_s": candidate.nbytes / took / 1e9,
            "gflop_per_s": flops / took / 1e9,
            "read_gb_per_s": limits.read_bytes_per_s / 1e9,
            "bound": limit.bound,
            "fraction": None if why else fraction,
            "doubt": why or None,
        }


def main(arguments: list[str]) -> None:
    """Print a line for each size, number of tokens and backend."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", action="append", metavar="N,K", help="rows and columns")
    parser.add_argument("-b", "--backend", action="append", metavar="NAME[:FORMAT]")
    parser.add_argument("--tokens", default="1", metavar="T,T")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.25, help="length of a turn")
    parser.add_argument("--rotate", type=float, metavar="GB", help="default: 1.5 x the last cache")
    parser.add_argument("--noise", type=float, default=0.05, help="as of ktk bench")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        check_threads(options.threads)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: it must be at least 1")
    try:
        counts = [int(text) for text in options.tokens.split(",")]
        sizes = [tuple(map(int, text.split(","))) for text in options.size or DEFAULT_SIZES]
    except ValueError as error:
        parser.error(str(error))
    if min(counts) < 1 or any(len(size) != 2 or min(size) < 1 for size in sizes):
        parser.error("--tokens and --size are numbers from 1 on, --size two of them: rows,columns")
    pool = ktk.WorkerPool(options.threads)
    cpus = [cpu for cpu in pool.cpus if cpu >= 0]
    whole = last_level_cache_bytes() * 3 // 2
    rotated = whole if options.rotate is None else int(options.rotate * 1e9)
    # Nothing to rotate is for trials of this script: no number means anything then.
    probe = LimitProbe(pool.size, cpus=cpus, buffer_bytes=None if rotated else 64 << 20)
    for n, k in sizes:
        candidates = [Candidate(one, n, k, rotated, pool) for one in options.backend or DEFAULT]
        for tokens in counts:
            for result in measure(candidates, n, k, tokens, probe, options):
                if options.json:
                    print(json.dumps(result), flush=True)
                    continue
                reached = "-" if result["doubt"] else f"{result['fraction']:.2f}"
                print(
                    f"{n}x{k} T={tokens} {result['layer']}: {result['us']:.1f} us, "
                    f"{result['packed_mb']:.2f} MB, {result['gb_per_s']:.1f} GB/s of "
                    f"{result['read_gb_per_s']:.1f}, {result['gflop_per_s']:.0f} GFLOP/s, "
                    f"reached {reached} ({result['doubt'] or result['bound']})",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
