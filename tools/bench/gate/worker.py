"""Times calls of layers of the ktk that this Python has, one sample whenever a line asks for one.

Asked by lines of JSON, [backend, tokens, seconds]: calls of a layer with so many tokens, for at
least so many seconds. Answers with the seconds and the instructions of a call, the latter null
where they cannot be counted; or with null where the backend cannot run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

import ktk
from ktk.bench.inputs import random_experts, routed_calls
from ktk.bench.records import Subject
from ktk.bench.runner import load_subject, make_layer
from ktk.bench.shapes import find_shape
from ktk.bench.weights import prepare
from ktk.errors import BackendNotFound

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gate.counter import instructions

torch.set_num_threads(1)
SHAPE, EXPERTS, THREADS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
shape = find_shape(SHAPE)
shape = shape.with_experts(EXPERTS or shape.num_experts)
counter = instructions()  # before there are threads
pool = ktk.WorkerPool(THREADS)


@cache
def layer(name: str) -> Any:
    try:
        subject = Subject(name)
        return make_layer(
            subject, shape, prepare(load_subject(subject)[1], random_experts(shape, 2)), pool
        )
    except (ktk.BackendUnsupported, BackendNotFound):  # an older build may lack a backend
        return None


calls = cache(lambda tokens: routed_calls(shape, tokens))
position: dict[tuple[str, int], int] = {}


def sample(name: str, tokens: int, seconds: float) -> tuple[float, float | None] | None:
    moe = layer(name)
    if moe is None:
        return None
    inputs = calls(tokens)
    times: list[float] = []
    counts: list[int] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        at = position[name, tokens] = position.get((name, tokens), -1) + 1
        one = inputs[at % len(inputs)]
        before = counter.read() if counter else 0
        begin = time.perf_counter()
        moe(one.hidden, one.ids, one.weights)
        times.append(time.perf_counter() - begin)
        if counter:
            counts.append(counter.read() - before)
    return statistics.median(times), statistics.median(counts) if counts else None


for line in sys.stdin:
    print(json.dumps(sample(*json.loads(line))), flush=True)
