"""Memory: how much there is, what is in swap, its pages and its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ktk import system
from ktk.cli.health.finding import NOTE, OK, WARNING, Finding, count
from ktk.cli.health.machine import NODES, SECONDS, Machine, Process
from ktk.sizes import size_text

#: Shares of the memory there is: less is little, more in swap is much.
_LITTLE, _MUCH_SWAP = 0.1, 0.05
#: Pages to and from swap between two samples that are no chance: 2 MiB.
_MOVING = 512
_HUGE = "sys/kernel/mm/transparent_hugepage/enabled"


def memory(machine: Machine) -> Iterator[Finding]:
    """Say how much memory there is, and how much of it the process may have."""
    total, free = system.total_memory(machine.root), system.available_memory(machine.root)
    limit = system.memory_limit(machine.root)
    text = f"{size_text(total)}, of which {size_text(free)} can be had"
    if free < _LITTLE * (limit or total):
        group = min(system.memory_limits(machine.root), key=lambda one: one.free, default=None)
        if group is not None and group.free <= free:
            text += f"; the cgroup's limit is {size_text(group.nbytes)}"
            advice = "end what else runs in this group, or raise its limit (docker --memory)"
            evidence = f"{group.path}: {group.nbytes}, of which {group.used} used"
        else:
            text += _biggest(machine, "resident", "has {}")
            advice = "end what needs memory, or take a backend with fewer bits: ktk inspect MODEL"
            evidence = (
                f"/proc/meminfo: MemAvailable {machine.entry('proc/meminfo', 'MemAvailable')}"
            )
        yield Finding("memory", WARNING, text, advice, evidence)
    elif limit is not None:
        yield Finding(
            "memory",
            NOTE,
            f"{text}; the cgroup's limit is {size_text(limit)}",
            "raise the limit (docker --memory, a Kubernetes memory limit) for larger models",
        )
    else:
        yield Finding("memory", OK, text)
    yield from _reserved(machine, total)


def _reserved(machine: Machine, total: int) -> Iterator[Finding]:
    pages = int(machine.entry("proc/meminfo", "HugePages_Free") or 0)
    size = _kib(machine.entry("proc/meminfo", "Hugepagesize"))
    if total and pages * size > _LITTLE * total:
        yield Finding(
            "memory",
            WARNING,
            f"{size_text(pages * size)} are reserved for huge pages that nobody uses; ktk's are "
            "transparent ones, of ordinary memory",
            "as root, unless another program needs them: sysctl vm.nr_hugepages=0",
            f"/proc/meminfo: HugePages_Free {pages}",
        )


def swap(machine: Machine) -> Iterator[Finding]:
    """Tell memory that lies in swap, and pages on their way, from a little that nobody misses."""
    total = system.total_memory(machine.root)
    whole, free = (_kib(machine.entry("proc/meminfo", name)) for name in ("SwapTotal", "SwapFree"))
    before, after = machine.samples
    moved = after.swapped_pages - before.swapped_pages
    advice = "end what needs memory, or take a backend with fewer bits; swapoff keeps weights out"
    used = f"{size_text(whole - free)} of {size_text(whole)}"
    if moved > _MOVING:
        text = f"{moved} pages went to or from swap in {SECONDS} s"
        evidence = f"/proc/vmstat: pswpin and pswpout grew by {moved}"
    elif total and whole - free > _MUCH_SWAP * total:
        text = f"{used} are in use: what lies there is read from a disk"
        evidence = f"/proc/meminfo: SwapFree {machine.entry('proc/meminfo', 'SwapFree')}"
    elif whole:
        yield Finding("swap", OK, f"{used} are in use")
        return
    else:
        yield Finding("swap", OK, "none")
        return
    yield Finding(
        "swap", WARNING, text + _biggest(machine, "swapped", "has {} in it"), advice, evidence
    )


def pages(machine: Machine) -> Iterator[Finding]:
    """Say whether weights can lie in huge pages."""
    mode = system.huge_pages(machine.root)
    if mode not in ("always", "madvise"):
        yield Finding(
            "huge pages",
            WARNING,
            f"transparent huge pages: {mode or 'not in this kernel'}",
            f"reading weights costs more without them: as root, write madvise to /{_HUGE}",
            f"/{_HUGE}: {machine.text(_HUGE) or 'no such file'}",
        )
    elif machine.entry("proc/self/status", "THP_enabled") == "0":
        yield Finding(
            "huge pages",
            WARNING,
            "the program that started this one switched transparent huge pages off for it",
            "start it by something that does not call prctl(PR_SET_THP_DISABLE)",
            "/proc/self/status: THP_enabled 0",
        )
    else:
        yield Finding("huge pages", OK, f"transparent huge pages: {mode}")


def numa(machine: Machine) -> Iterator[Finding]:
    """Compare the nodes of the CPUs with the nodes whose memory can be had."""
    nodes = machine.topology["nodes"]
    of_nodes = ", ".join(f"node {node['id']} with {_cores(node)}" for node in nodes)
    status = "proc/self/status"
    allowed = system.numbers_of(machine.entry(status, "Mems_allowed_list"))
    if far := [node["id"] for node in nodes if not node["has_memory"]]:
        yield Finding(
            "NUMA",
            WARNING,
            f"{of_nodes}; without memory: {_ids(far)}",
            "workers there read from other nodes; a mask of CPUs (numactl, taskset) leaves them "
            "out",
            f"/{NODES}/has_memory: {machine.text(f'{NODES}/has_memory')}",
        )
    elif allowed and (far := [node["id"] for node in nodes if node["id"] not in allowed]):
        yield Finding(
            "NUMA",
            WARNING,
            f"{of_nodes}, but memory comes from node {_ids(allowed)} only: workers of node "
            f"{_ids(far)} read all of it from there",
            "allow memory of all nodes that have workers (docker --cpuset-mems, cpuset.mems)",
            f"/{status}: Mems_allowed_list {machine.entry(status, 'Mems_allowed_list')}",
        )
    elif full := _full(machine, [node["id"] for node in nodes]):
        yield full
    elif len(nodes) > 1:
        yield Finding("NUMA", OK, f"{of_nodes}; weights are divided between them")
    else:
        yield Finding("NUMA", OK, of_nodes)


def _full(machine: Machine, ids: list[int]) -> Finding | None:
    """Find a node whose memory is used up while others have some."""
    shares = {}
    for node in ids:
        found = {
            name: _kib(value)
            for name, value in re.findall(
                rf"Node {node} (\S+):(.*)", machine.text(f"{NODES}/node{node}/meminfo")
            )
        }
        # Pages of files are given up for weights.
        free = sum(found.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
        if found.get("MemTotal"):
            shares[node] = (free / found["MemTotal"], free)
    if not shares or max(shares.values())[0] < 3 * _LITTLE:
        return None  # all are full: `memory` says so
    for node, (share, free) in shares.items():
        if share < _LITTLE:
            return Finding(
                "NUMA",
                WARNING,
                f"node {node} has {size_text(free)} left, {share:.0%} of its memory: weights of "
                "its workers have no place elsewhere, and Linux swaps or ends what asks for more",
                "end what fills it (numastat -m shows what), or leave its CPUs out (numactl)",
                f"/{NODES}/node{node}/meminfo: MemFree and pages of files {free // 1024} kB",
            )
    return None


def _biggest(machine: Machine, what: str, text: str) -> str:
    """Name the process that has most memory, resident or swapped, if one stands out."""

    def bytes_of(process: Process) -> int:
        return int(getattr(process, what))

    process = max(machine.samples[1].processes.values(), key=bytes_of, default=None)
    if process is None or bytes_of(process) < 0.02 * system.total_memory(machine.root):
        return ""
    return f"; {process} {text.format(size_text(bytes_of(process)))}"


def _kib(text: str) -> int:
    """Return the bytes of "12 kB"; 0 of nothing."""
    return int(text.split()[0]) * 1024 if text.strip() else 0


def _ids(ids: list[int]) -> str:
    return ", ".join(map(str, ids))


def _cores(node: dict[str, Any]) -> str:
    return count(len(node["cores"]), "core")
