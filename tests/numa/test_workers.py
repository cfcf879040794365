"""Where workers run on a machine of several NUMA nodes, and whose memory they read."""

from __future__ import annotations

import os
import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numa_layers as layers
import pytest
from numa_memory import NODES, FirstReads, Read, added, bound, move_to, tasks, workers_of

import ktk

IDS = [node["id"] for node in NODES]
CPUS = [node["cpus"][:2] for node in NODES]
NODE_OF_CPU = {cpu: node["id"] for node in NODES for cpu in node["cpus"]}


def node_of_worker(pool: ktk.WorkerPool, worker: int) -> int:
    return int(NODES[pool.nodes[worker]]["id"])


def reads_of_a_call(
    first_reads: FirstReads, moe: ktk.MoE, weights: Sequence[Any], tokens: int
) -> list[Read]:
    with first_reads.of(weights) as reads:
        layers.compute(moe, tokens)
    return reads


def test_a_worker_may_use_its_cpu_and_that_is_its_nodes() -> None:
    before = tasks()
    pool = ktk.WorkerPool()
    assert pool.size == sum(len(node["cores"]) for node in NODES)
    for task, worker in workers_of(pool, before).items():
        if worker == 0:
            continue
        allowed = os.sched_getaffinity(task)
        assert allowed == {pool.cpus[worker]}
        assert allowed <= set(NODES[pool.nodes[worker]]["cpus"])


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("workers", [(2, 2), (1, 2)])
def test_workers_read_their_own_node_and_help_afterwards(
    first_reads: FirstReads, workers: tuple[int, int], tokens: int
) -> None:
    cpus = [CPUS[node][:count] for node, count in enumerate(workers)]
    others = tasks()
    pool = ktk.WorkerPool(cpus=[*cpus[0], *cpus[1]])
    worker_of = workers_of(pool, others)
    move_to([pool.cpus[0]])
    moe = layers.layer("BF16", pool)
    before = bound()
    moe.load(**layers.weights("BF16"))
    weights = added(before)
    own = total = 0
    for _ in range(5):
        by_worker: dict[int, list[Read]] = defaultdict(list)
        for read in reads_of_a_call(first_reads, moe, weights, tokens):
            by_worker[worker_of[read.thread]].append(read)
        for worker, reads in by_worker.items():
            node = node_of_worker(pool, worker)
            assert {NODE_OF_CPU[read.cpu] for read in reads} == {node}
            # Gate and up, then down: in each of them what is on the own node comes first.
            order = "".join("o" if read.node == node else "x" for read in reads)
            assert re.fullmatch("o*x*o*x*", order), f"worker {worker}: {order}"
            own += order.count("o")
            total += len(order)
    assert total >= 5 * moe.nbytes // 4096
    print(f"{own} of {total} pages were read by workers of their node")
    # Half of them, where workers take what comes; all, where none has to help.
    assert own > total / 2


@pytest.mark.parametrize("node", [0, 1])
def test_the_caller_computes_on_the_node_of_worker_0(first_reads: FirstReads, node: int) -> None:
    # One worker on each node, and the caller on another CPU of either.
    pool = ktk.WorkerPool(cpus=[CPUS[0][0], CPUS[1][0]])
    move_to([CPUS[node][1]])
    moe = layers.layer("BF16", pool)
    before = bound()
    moe.load(**layers.weights("BF16"))
    reads = reads_of_a_call(first_reads, moe, added(before), 3)
    mine = [read for read in reads if read.thread == threading.get_native_id()]
    assert mine
    assert {NODE_OF_CPU[read.cpu] for read in mine} == {IDS[0]}
    assert os.sched_getaffinity(0) == {CPUS[node][1]}
