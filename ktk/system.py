"""What Linux says about this machine: CPUs, their time and caches, memory, cgroups' limits."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
#: Of CPU time in /proc, per second.
TICKS = os.sysconf("SC_CLK_TCK")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def let_openmp_sleep() -> None:
    """Have torch's threads sleep between its operations, unless the user has said otherwise.

    By default they keep their cores busy for a while, which are the cores of ktk's workers. Counts
    only before torch is imported.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def give_memory_back() -> None:
    """Give free memory of this process back to the system.

    glibc before 2.38 does not use a block again that was aligned, as those of torch are, for one of
    the same size: much work with large tensors takes ever more memory. Other libraries of C do.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def cpu_flags(root: Path = ROOT) -> set[str]:
    """Return what the first CPU can do, in the kernel's words; empty where it does not say."""
    for line in read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory of the machine."""
    return _meminfo("MemTotal", root)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that can be allocated without swapping, inside the cgroup's limit."""
    free = [limit.free for limit in memory_limits(root)]
    return max(0, min([_meminfo("MemAvailable", root), *free]))


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the cgroup's limit in bytes; None where it is not below what the machine has."""
    smallest = min((limit.nbytes for limit in memory_limits(root)), default=None)
    return smallest if smallest is not None and smallest < total_memory(root) else None


def huge_pages(root: Path = ROOT) -> str:
    """Return the mode of transparent huge pages: always, madvise or never; empty without them."""
    text = read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0]


def last_level_cache_bytes(root: Path = ROOT) -> int:
    """Bytes of last-level cache that this process can use, all its instances together."""
    instances: dict[tuple[int, str], int] = {}
    for cpu in os.sched_getaffinity(0):
        for cache in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            try:
                level = int((cache / "level").read_text())
                size = re.fullmatch(r"(\d+)([KMG]?)", (cache / "size").read_text().strip())
                shared = (cache / "shared_cpu_list").read_text().strip()
            except (OSError, ValueError):
                continue
            if size:
                instances[level, shared] = int(size[1]) * _UNITS[size[2]]
    last = max((level for level, _ in instances), default=0)
    return sum(size for (level, _), size in instances.items() if level == last)


@dataclass(frozen=True)
class Driver:
    """The CUDA driver: its version as 12040 for 12.4, how many GPUs it sees, or what is wrong."""

    version: int = 0
    devices: int = 0
    error: str = ""


def cuda_driver(library: str = "libcuda.so.1") -> Driver | None:
    """Ask the CUDA driver; None where there is none."""
    try:
        cuda = ctypes.CDLL(library)
    except OSError:
        return None
    version, devices = ctypes.c_int(), ctypes.c_int()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDriverGetVersion", (ctypes.byref(version),)),
        ("cuDeviceGetCount", (ctypes.byref(devices),)),
    ):
        if status := getattr(cuda, name)(*arguments):
            return Driver(version.value, error=f"{name} fails with CUresult {status}")
    return Driver(version.value, devices.value)


@dataclass(frozen=True)
class MemoryLimit:
    """A cgroup's limit of memory in bytes, how much of it is used, and the file that has it."""

    path: str
    nbytes: int
    used: int

    @property
    def free(self) -> int:
        """What is left of it."""
        return self.nbytes - self.used


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Return the limits of the cgroup and those around it, as far as they are seen.

    Pages of files that were read are no use: the kernel gives them up before it runs out.
    """
    found = []
    for folder, version in cgroups("memory", root):
        names: tuple[str, ...]
        if version == 2:
            # Above `high` a process is not ended, but hardly moves.
            names, used_by = ("memory.max", "memory.high"), "memory.current"
            cached = ("inactive_file", "active_file")
        else:
            names, used_by = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
            cached = ("total_inactive_file", "total_active_file")
        used = read(folder / used_by).strip()
        texts = {name: read(folder / name).strip() for name in names}
        # "max": none
        limits = {int(text): name for name, text in texts.items() if text.isdigit()}
        if limits and used.isdigit():
            statistics = dict(map(str.split, read(folder / "memory.stat").splitlines()))
            free = sum(int(statistics.get(name, 0)) for name in cached)
            path = shown(folder / limits[min(limits)], root)
            found.append(MemoryLimit(path, min(limits), max(0, int(used) - free)))
    return found


@dataclass(frozen=True)
class CpuQuota:
    """How many CPUs a cgroup's quota pays for, and the file that has it, with its text.

    In `throttled` of `periods` since the group was made it stood still, having used its quota up;
    both are 0 where the kernel does not count.
    """

    cpus: float
    path: str
    text: str
    periods: int
    throttled: int


def cpu_quota(root: Path = ROOT) -> CpuQuota | None:
    """Return the smallest quota of the cgroup and those around it; None without one.

    The core computes the same (native/core/topology.cc), and has no need for the file.
    """
    found = []
    for folder, version in cgroups("cpu", root):
        if version == 2:
            text, name = read(folder / "cpu.max").strip(), "cpu.max"
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            text, name = " ".join(read(folder / one).strip() for one in names), names[0]
        quota, _, period = text.partition(" ")
        # "max" and -1: none
        if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
            statistics = dict(map(str.split, read(folder / "cpu.stat").splitlines()))
            counts = (int(statistics.get(key, 0)) for key in ("nr_periods", "nr_throttled"))
            path = shown(folder / name, root)
            found.append(CpuQuota(int(quota) / int(period), path, text, *counts))
    return min(found, key=lambda quota: quota.cpus, default=None)


def cgroups(controller: str, root: Path = ROOT) -> Iterator[tuple[Path, int]]:
    """Yield folder and version, 1 or 2, of the cgroup for a controller and of those around it."""
    # "<hierarchy>:<controllers>:<group>"; version 2 is hierarchy 0 without controllers.
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        mount = root / "sys/fs/cgroup"
        if controllers != "":
            if controller not in controllers.split(","):
                continue
            # Distributions link the single name to the common mount; containers may have only
            # the link.
            joint = mount / controllers
            mount = joint if joint.is_dir() else mount / controller
        # A container may see its own group mounted as the root, under the name it has outside.
        path = Path(group.lstrip("/"))
        for inside in (path, *path.parents):
            yield mount / inside, 2 if controllers == "" else 1


@dataclass(frozen=True)
class Ticks:
    """CPU time of one CPU in ticks: of any work, given to other virtual machines, and idle."""

    busy: int
    stolen: int
    idle: int

    @property
    def all(self) -> int:
        """The time that passed."""
        return self.busy + self.stolen + self.idle

    def since(self, before: Ticks) -> Ticks:
        """Return what was spent since an earlier reading."""
        return Ticks(self.busy - before.busy, self.stolen - before.stolen, self.idle - before.idle)


def cpu_ticks(root: Path = ROOT) -> dict[int, Ticks]:
    """Return what each CPU that is online did since the machine started."""
    found = {}
    for line in read(root / "proc/stat").splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit():
            user, nice, system, idle, waiting, irq, softirq, stolen = map(int, fields[:8])
            busy = user + nice + system + irq + softirq
            found[int(name[3:])] = Ticks(busy, stolen, idle + waiting)
    return found


def numbers_of(text: str) -> list[int]:
    """Return 0, 1, 2, 3 and 8 for "0-3,8", as Linux writes lists of CPUs and nodes."""
    ranges = (part.partition("-") for part in text.strip().split(",") if part.strip())
    return [one for first, _, last in ranges for one in range(int(first), int(last or first) + 1)]


def shown(path: Path, root: Path = ROOT) -> str:
    """Return the path of a file below `root` as it is on the machine."""
    return f"/{path.relative_to(root)}"


def read(path: Path) -> str:
    """Return what is in a file; empty where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _meminfo(name: str, root: Path) -> int:
    for line in read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
