"""CPUs for each of the processes that share a machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ktk import _core, system
from ktk.pool import set_default_cpus


def share_cpus(group: Any = None) -> list[int]:
    """Give this process its part of the CPUs that all ranks on this machine may use.

    Ranks that may use the same CPUs divide these evenly, by physical cores and as few NUMA nodes
    each as possible. A rank that was bound to CPUs of its own keeps them. All threads of the
    process are bound to the part, and so is the pool of layers that are made from now on.

    Parameters
    ----------
    group : ProcessGroup, optional
        By default all ranks. All of them call this.

    Returns
    -------
    list of int
        The CPUs of this process; one for each worker comes first.
    """
    import torch
    import torch.distributed as dist

    from ktk.distributed.connect import machine

    group = dist.group.WORLD if group is None else group
    allowed = sorted(os.sched_getaffinity(0))
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, (machine(), allowed), group=group)
    rank = dist.get_rank(group)
    alike = [other for other, one in enumerate(every) if one == (machine(), allowed)]
    nodes = _core.read_topology("/", allowed)["nodes"]
    cores, mine = cpu_share(nodes, siblings_of(allowed), alike.index(rank), len(alike))
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), mine)
        except ProcessLookupError:  # it has ended
            continue
    torch.set_num_threads(max(1, min(torch.get_num_threads(), len(cores))))
    set_default_cpus(cores)
    return [*cores, *(cpu for cpu in mine if cpu not in set(cores))]


def cpu_share(
    nodes: Sequence[dict[str, Any]], siblings: dict[int, set[int]], index: int, count: int
) -> tuple[list[int], list[int]]:
    """Return the CPUs of one of several processes: one for each worker, and all.

    Parameters
    ----------
    nodes
        As `nodes` of the core's topology.
    siblings
        The CPUs of the physical core of each CPU.
    index, count
        Which process of how many. With more processes than cores these divide hardware threads;
        with more than those, several processes have the same one.
    """
    cores = [cpu for node in nodes for cpu in node["cores"]]
    if count > len(cores):
        cores = [cpu for node in nodes for cpu in node["cpus"]]
        siblings = {cpu: {cpu} for cpu in cores}
    if count > len(cores):
        return [cores[index % len(cores)]], [cores[index % len(cores)]]
    mine = cores[len(cores) * index // count : len(cores) * (index + 1) // count]
    allowed = {cpu for node in nodes for cpu in node["cpus"]}
    return mine, sorted({one for cpu in mine for one in siblings.get(cpu, {cpu})} & allowed)


def siblings_of(cpus: Sequence[int], root: str = "/") -> dict[int, set[int]]:
    """Return the CPUs that share a physical core with each CPU, itself included."""
    path = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    texts = {cpu: system.read(Path(root) / path.format(cpu)) for cpu in cpus}
    return {cpu: set(system.numbers_of(text or str(cpu))) for cpu, text in texts.items()}
