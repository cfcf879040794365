"""Which CPUs ktk may use, who else uses them, and how many workers share them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from ktk import system
from ktk.cli.health.finding import NOTE, OK, PROBLEM, WARNING, Finding, count, numbers
from ktk.cli.health.machine import CPUS, SECONDS, Machine
from ktk.errors import BackendError, SettingError
from ktk.registry import find_backend
from ktk.settings import FILE, KEYS, config_file, faults, setting

#: Shares of CPU time from which on others are in the way: below them are editors and daemons.
_OTHERS, _STOLEN = 0.25, 0.05


def workers(machine: Machine) -> Iterator[Finding]:
    """Say how many workers there are, and what the quota of the cgroup pays for."""
    cores = _cores(machine.topology)
    threads = machine.topology["default_threads"]
    text = f"{count(threads, 'worker')} by default, for {count(len(cores), 'physical core')}"
    yield Finding("workers", OK, text)
    quota = system.cpu_quota(machine.root)
    if quota is None or math.ceil(quota.cpus) >= len(cores):
        return
    evidence = f"{quota.path}: {quota.text}"
    if quota.periods and quota.throttled:
        evidence += f", and in cpu.stat nr_throttled {quota.throttled} of {quota.periods} periods"
    yield Finding(
        "CPU quota",
        WARNING,
        f"the cgroup's quota pays for {quota.cpus:g} of {count(len(cores), 'physical core')}",
        "raise the quota (docker --cpus, a Kubernetes CPU limit) to use all cores",
        evidence,
    )


def mask(machine: Machine) -> Iterator[Finding]:
    """Tell a mask that leaves cores out from one of hardware threads of the same cores."""
    mine, every = _cores(machine.topology), _cores(machine.whole)
    left = len(every) - len(mine)
    if left <= 0:
        return
    if len(machine.cpus) >= 2 * len(mine):
        first = machine.cpus[0]
        path = f"{CPUS}/cpu{first}/topology/thread_siblings_list"
        better = every[: len(machine.cpus)]
        yield Finding(
            "SMT",
            WARNING,
            f"the {len(machine.cpus)} CPUs that this process may use are hardware threads of "
            f"{count(len(mine), 'core')}, and {count(left, 'core')} are left out",
            f"take one CPU of each core: taskset -c {numbers(better)}",
            f"/{path}: {machine.text(path)}",
        )
        return
    yield Finding(
        "CPU mask",
        WARNING,
        f"this process may use {len(mine)} of {count(len(every), 'physical core')}",
        "take away the mask (taskset, numactl, docker --cpuset-cpus) to use all cores",
        f"Cpus_allowed_list of /proc/self/status: {numbers(machine.cpus)}",
    )


def threads(machine: Machine) -> Iterator[Finding]:
    """Compare the workers that were asked for with CPUs and cores, and look at torch's threads."""
    try:
        wrong = faults()
        for name, fault in wrong.items():
            yield Finding("settings", PROBLEM, fault, f"ktk config {name} --unset takes it out")
    except SettingError as error:
        yield Finding("settings", PROBLEM, str(error), "ktk config shows settings")
        return
    for name in KEYS.keys() - wrong.keys() - {"threads"}:
        try:
            found = setting(name).value
            if name in ("backend", "linears", "head") and found is not None:
                find_backend(found)
        except (SettingError, BackendError) as error:
            advice = f"unset {KEYS[name].variable}, or ktk config {name} --unset"
            yield Finding("settings", PROBLEM, str(error), advice)
    try:
        wanted = setting("threads")
    except SettingError as error:
        if "threads" not in wrong:  # of the variable
            yield Finding("settings", PROBLEM, str(error), "unset it, or give another number")
        return
    cores, quota = len(_cores(machine.topology)), system.cpu_quota(machine.root)
    cpus = min(len(machine.cpus), math.ceil(quota.cpus) if quota else len(machine.cpus))
    source = f"{config_file()}: threads" if wanted.source == FILE else wanted.source
    evidence = f"{source}={wanted.value}"
    advice = f"unset it, or ask for {min(cores, cpus)}: one worker for each core"
    if wanted.value is not None and wanted.value > cpus:
        text = f"{wanted.value} workers wait for each other on {count(cpus, 'CPU')}"
        yield Finding("oversubscription", WARNING, text, advice, evidence)
    elif wanted.value is not None and wanted.value > cores:
        text = f"{wanted.value} workers share the multipliers of {count(cores, 'core')}"
        yield Finding("SMT", WARNING, text, advice, evidence)
    elif wanted.value is not None and wanted.value < min(cores, cpus):
        text = f"{count(wanted.value, 'worker')} of {min(cores, cpus)} that there could be"
        yield Finding("workers", NOTE, text, "unset it to use all cores", evidence)
    if os.environ.get("OMP_WAIT_POLICY", "").lower() == "active":
        yield Finding(
            "oversubscription",
            WARNING,
            "torch's threads stay busy between operations, on the cores of ktk's workers",
            "set OMP_WAIT_POLICY=passive",
            f"OMP_WAIT_POLICY={os.environ['OMP_WAIT_POLICY']}",
        )


def others(machine: Machine) -> Iterator[Finding]:
    """Measure who else uses these CPUs, the other threads of their cores, or the whole machine."""
    before, after = machine.samples
    spent = {
        cpu: after.cpus[cpu].since(ticks) for cpu, ticks in before.cpus.items() if cpu in after.cpus
    }
    mine = [cpu for cpu in machine.cpus if cpu in spent]
    beside = {sibling for cpu in mine for sibling in machine.siblings(cpu)} - set(mine)
    beside &= spent.keys()
    total = max(1, sum(spent[cpu].all for cpu in mine))
    busy, stolen = (sum(getattr(spent[cpu], what) for cpu in mine) for what in ("busy", "stolen"))
    if busy / total >= _OTHERS:
        yield Finding(
            "oversubscription",
            WARNING,
            f"other processes use {busy / total:.0%} of the CPUs that ktk may use{_most(machine)}",
            "end them, bind them to other CPUs, or give ktk fewer threads: KTK_THREADS",
            f"/proc/stat: {busy} of {total} ticks busy in {SECONDS} s",
        )
    if stolen / total >= _STOLEN:
        yield Finding(
            "stolen time",
            WARNING,
            f"the hypervisor gives {stolen / total:.0%} of the CPU time of this virtual machine "
            "to others",
            "use an instance whose CPUs are its own",
            f"/proc/stat: {stolen} of {total} ticks stolen in {SECONDS} s",
        )
    near = sum(spent[cpu].busy for cpu in beside)
    near_total = max(1, sum(spent[cpu].all for cpu in beside))
    if near / near_total >= _OTHERS:
        yield Finding(
            "SMT",
            WARNING,
            f"other processes use {near / near_total:.0%} of CPUs {numbers(list(beside))}, "
            f"hardware threads of the cores that ktk may use{_most(machine)}",
            "end them, or bind them to other cores",
            f"/proc/stat: {near} of {near_total} ticks busy in {SECONDS} s",
        )


def _most(machine: Machine) -> str:
    """Name the process that used most CPU time between the samples, if one stands out."""
    before, after = machine.samples
    spent = {
        pid: process.ticks - before.processes[pid].ticks
        for pid, process in after.processes.items()
        if pid in before.processes
    }
    pid = max(spent, key=lambda pid: spent[pid], default=None)
    if pid is None or spent[pid] < SECONDS * system.TICKS / 4:
        return ""
    return f", most of it {after.processes[pid]}"


def _cores(topology: dict[str, list[dict[str, list[int]]]]) -> list[int]:
    return [core for node in topology["nodes"] for core in node["cores"]]
