"""Worker pools as kt-kernel counts them: threads in all, over pools that belong to NUMA nodes."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ktk import _core
from ktk.ktmoe.arguments import at_least
from ktk.pool import MadeOnce, default_pool

logger = logging.getLogger(__name__)


def shared_pool(
    threads: int | None, pool_count: int | None, numa_nodes: Sequence[int] | None
) -> _core.WorkerPool:
    """Return the one pool of this process for these settings.

    Parameters
    ----------
    threads : int, optional
        Workers in all; by default one per physical core of the nodes, and the pool that other
        layers of this process use where no nodes are named either. More than the CPUs that the
        process may use on these nodes are cut down to them, with a warning.
    pool_count : int, optional
        Parts that the workers are divided into, one per NUMA node. More of them than nodes share
        nodes.
    numa_nodes : sequence of int, optional
        The node of each part; by default those of the machine in order.

    Raises
    ------
    ValueError
        For a node that the process has no CPU on, and numbers that contradict each other.
    """
    threads = None if threads is None else at_least("cpuinfer_threads", threads, 1)
    pool_count = None if pool_count is None else at_least("threadpool_count", pool_count, 1)
    if numa_nodes is not None:
        if not len(numa_nodes):
            raise ValueError("numa_nodes names no node; leave it out for all of the machine")
        if pool_count is not None and len(numa_nodes) != pool_count:
            raise ValueError(
                f"numa_nodes names {len(numa_nodes)} nodes, but threadpool_count is {pool_count}"
            )
        numa_nodes = tuple(int(node) for node in numa_nodes)
    if threads is None and numa_nodes is None:
        pool = default_pool()
    else:
        pool = _pool(threads, pool_count or len(numa_nodes or (0,)), numa_nodes)
    # Threads inherit the affinity of who makes them, and some engines pin their main thread to one
    # core later: all threads of the pool are made now.
    _core.drain(pool)
    return pool


@MadeOnce
def _pool(threads: int | None, count: int, numa_nodes: tuple[int, ...] | None) -> _core.WorkerPool:
    nodes = {node["id"]: node for node in _core.topology()["nodes"]}
    ids = list(nodes)
    if numa_nodes is None:
        numa_nodes = tuple(ids[part * len(ids) // count] for part in range(count))
        if count > len(ids):
            logger.info("%d thread pools share %d NUMA node(s)", count, len(ids))
    missing = sorted(set(numa_nodes) - set(ids))
    if missing:
        raise ValueError(
            f"numa_nodes has {missing[0]}, but this process may use CPUs of node "
            f"{', '.join(map(str, ids))} only"
        )
    if threads is None:
        threads = sum(len(nodes[node]["cores"]) for node in set(numa_nodes))
    wanted = dict.fromkeys(numa_nodes, 0)
    for part, node in enumerate(numa_nodes):
        wanted[node] += threads // count + (part < threads % count)
    cpus = [cpu for node, number in wanted.items() for cpu in _cpus(nodes[node])[:number]]
    if len(cpus) < threads:
        logger.warning(
            "cpuinfer_threads is %d, but this process may use %d CPUs of NUMA node(s) %s: taking "
            "these",
            threads,
            len(cpus),
            ", ".join(map(str, wanted)),
        )
    return _core.WorkerPool(len(cpus), cpus=cpus)


def _cpus(node: dict[str, list[int]]) -> list[int]:
    """Return a node's CPUs, the first hardware thread of each core before the others."""
    first = node["cores"]
    return [*first, *(cpu for cpu in node["cpus"] if cpu not in set(first))]
