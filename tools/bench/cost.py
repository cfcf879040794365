"""Compare what MoE.cost predicts with what calls take: random cells, prediction before truth.

python tools/bench/cost.py                                # 200 cells, a minute or two; idle machine
python tools/bench/cost.py -b BF16 --threads 1 --cells 50

A cell is a call with 1 to 512 tokens, logarithmically spread, that choose experts by a skewed
popularity (none to strong), and of which a part of the experts (none to 90 %) is masked, as if a
GPU had them. Each is predicted twice: from the table alone, and with the slowdown of memory that
the call before shows: one token of a layer, as hosts compute all the time.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import torch

import ktk
from ktk import _core
from ktk.bench.inputs import random_experts
from ktk.bench.machine import check_threads
from ktk.bench.records import Subject
from ktk.bench.runner import load_subject, make_layer
from ktk.bench.shapes import Shape, find_shape
from ktk.bench.weights import prepare
from ktk.errors import BackendError
from ktk.system import last_level_cache_bytes

DEFAULT = ["BF16", "AMXINT8", "AMXINT4", "FP8"]
# Calls whose median is the truth, with other experts each time: so many, and more of short ones,
# which an interrupt makes twice as long.
REPEATS, SECONDS = 3, 0.02
CLOSE = 0.15


class _ByAge:
    """Numbers from 0 on, those first that were not taken for longest."""

    def __init__(self, count: int) -> None:
        self._numbers = torch.arange(count)

    def take(self, count: int) -> torch.Tensor:
        taken = self._numbers[:count]
        self._numbers = torch.cat([self._numbers[count:], taken])
        return taken


class Cells:
    """Random calls of layers in turn, those experts first that were not used for longest."""

    def __init__(self, layers: Sequence[ktk.MoE], shape: Shape, seed: int) -> None:
        self.shape = shape
        self._chance = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        self._turns = cycle((moe, _ByAge(shape.num_experts)) for moe in layers)

    def routing(self, tokens: int, skew: float, masked: float) -> torch.Tensor:
        """Return ids [tokens, k] of experts in the order of their numbers; -1 where masked."""
        experts, top_k = self.shape.num_experts, self.shape.num_experts_per_tok
        popularity = torch.randn(experts, generator=self._generator) * skew
        uniform = torch.rand(tokens, experts, generator=self._generator)
        # The largest of Gumbel's variates draw without replacement.
        ids = (popularity - (-uniform.log()).log()).topk(top_k, dim=1).indices
        away = torch.rand(experts, generator=self._generator) < masked
        return torch.where(away[ids], -1, ids)

    def cell(self) -> torch.Tensor:
        """Draw a cell that has something to compute."""
        while True:
            tokens = round(math.exp(self._chance.uniform(0, math.log(512))))
            masked = self._chance.choice([0.0, self._chance.uniform(0, 0.9)])
            ids = self.routing(tokens, self._chance.uniform(0, 1.5), masked)
            if (ids >= 0).any():
                return ids

    def rows(self, ids: torch.Tensor) -> list[int]:
        """Return the rows of each expert."""
        return torch.bincount(ids[ids >= 0], minlength=self.shape.num_experts).tolist()

    def call(self, ids: torch.Tensor) -> float:
        """Return the seconds of a call with the same numbers of rows, for other experts."""
        moe, by_age = next(self._turns)
        used = torch.unique(ids[ids >= 0])
        name = torch.full((self.shape.num_experts + 1,), -1)
        name[used] = by_age.take(len(used))
        hidden = torch.randn(len(ids), self.shape.hidden_size, generator=self._generator).bfloat16()
        weights = torch.rand(ids.shape, generator=self._generator)
        renamed = name[ids].contiguous()
        begin = time.perf_counter()
        moe(hidden, renamed, weights)
        return time.perf_counter() - begin

    def typical(self, ids: torch.Tensor) -> float:
        """Return the median of the seconds of some such calls."""
        took: list[float] = []
        while len(took) < REPEATS or sum(took) < SECONDS:
            took.append(self.call(ids))
        return statistics.median(took)


def compare(
    name: str, threads: int, cells: int, shape: Shape, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield what was predicted and what is true for each of so many cells."""
    subject, pool = Subject(name), ktk.WorkerPool(threads)
    weights = prepare(load_subject(subject)[1], random_experts(shape, 2))
    moe = make_layer(subject, shape, weights, pool)
    layers = [moe]
    # As in a model, whose layers do not all fit the cache.
    while len(layers) * moe.nbytes < 2 * last_level_cache_bytes():
        layers.append(make_layer(subject, shape, weights, pool))
    begin = time.perf_counter()
    table = moe.measure_cost()
    say(f"{name}, {threads} threads: measured in {time.perf_counter() - begin:.1f} s")
    drawn = Cells(layers, shape, seed)
    slowdown = 1.0
    for _ in range(cells):
        decode, ids = drawn.routing(1, 0.0, 0.0), drawn.cell()
        took = drawn.typical(decode)
        slowdown = table.memory_slowdown(drawn.rows(decode), took, 1) or slowdown
        rows, tokens = drawn.rows(ids), len(ids)
        alone = moe.cost(rows, tokens=tokens)
        predicted = moe.cost(rows, tokens=tokens, memory_slowdown=slowdown)
        truth = drawn.typical(ids)
        yield {
            "backend": name,
            "threads": threads,
            "tokens": tokens,
            "experts": sum(map(bool, rows)),
            "most_rows": max(rows),
            "rows": sum(rows),
            "slowdown": slowdown,
            "table_alone": alone,
            "predicted": predicted,
            "truth": truth,
        }


def report(found: Sequence[dict[str, Any]], key: str) -> str:
    """Return the share of close predictions, the median error and the worst one."""
    errors = [one[key] / one["truth"] - 1 for one in found]
    size = sorted(map(abs, errors))
    close = sum(error <= CLOSE for error in size)
    return (
        f"{close} of {len(size)} within {CLOSE:.0%}, median {statistics.median(size):.1%}, "
        f"bias {statistics.median(errors):+.1%}, worst {max(errors, key=abs):+.1%}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> None:
    """Print how far predictions are off."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-b", "--backend", action="append", metavar="NAME")
    parser.add_argument("--threads", action="append", type=int, metavar="N", help="default: 2, 1")
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--experts", type=int, default=0, help="fewer, to fit memory")
    parser.add_argument("--cells", type=int, default=200, help="in all; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print each cell as a line")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # threads of OpenMP keep the workers' CPUs busy between calls
    kinds = [
        (name, threads)
        for threads in options.threads or [2, 1]
        for name in options.backend or DEFAULT
    ]
    if options.cells < len(kinds):
        parser.error(
            f"--cells {options.cells}: they are dealt to {len(kinds)} pairs of a backend and a"
            f" number of threads; say {len(kinds)} or more"
        )
    try:
        shape = find_shape(options.shape)
        shape = shape.with_experts(options.experts or shape.num_experts)
        for name, threads in kinds:
            check_threads(threads)
            load_subject(Subject(name))
    except (ValueError, BackendError) as error:
        parser.error(str(error))
    found: list[dict[str, Any]] = []
    for number, (name, threads) in enumerate(kinds):
        count = options.cells * (number + 1) // len(kinds) - options.cells * number // len(kinds)
        part = list(compare(name, threads, count, shape, options.seed + number))
        found += part
        for one in part if options.json else ():
            print(json.dumps(one), flush=True)
        say(f"  table alone: {report(part, 'table_alone')}")
        say(f"  with slowdown: {report(part, 'predicted')}")
    say(f"{_core.cpu_model()}, {shape.name}, {len(found)} cells")
    say(f"  table alone: {report(found, 'table_alone')}")
    say(f"  with slowdown: {report(found, 'predicted')}")


if __name__ == "__main__":
    main(sys.argv[1:])
