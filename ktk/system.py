"""What Linux says about this machine: CPU flags, memory, the cgroup's limits, huge pages."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")


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
    for line in _read(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return set(value.split())
    return set()


def total_memory(root: Path = ROOT) -> int:
    """Return the bytes of memory of the machine."""
    return _meminfo("MemTotal", root)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes that can be allocated without swapping, inside the cgroup's limit."""
    free = [limit - used for limit, used in _limits(root)]
    return max(0, min([_meminfo("MemAvailable", root), *free]))


def memory_limit(root: Path = ROOT) -> int | None:
    """Return the cgroup's limit in bytes; None where it is not below what the machine has."""
    limits = [limit for limit, _ in _limits(root)]
    smallest = min(limits, default=None)
    return smallest if smallest is not None and smallest < total_memory(root) else None


def huge_pages(root: Path = ROOT) -> str:
    """Return the mode of transparent huge pages: always, madvise or never; empty without them."""
    text = _read(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0]


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


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of memory of the cgroup and those around it, as far as they are seen.

    Pages of files that were read are no use: the kernel gives them up before it runs out.
    """
    # "<hierarchy>:<controllers>:<group>"; version 2 is hierarchy 0 without controllers.
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            mount, used_by = "sys/fs/cgroup", "memory.current"
            # Above `high` a process is not ended, but hardly moves.
            limits: tuple[str, ...] = ("memory.max", "memory.high")
            cached = ("inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            mount = "sys/fs/cgroup/memory"
            limits, used_by = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
            cached = ("total_inactive_file", "total_active_file")
        else:
            continue
        # A container may see its own group mounted as the root, under the name it has outside.
        path = Path(group.lstrip("/"))
        for inside in (path, *path.parents):
            folder = root / mount / inside
            used = _read(folder / used_by).strip()
            texts = (_read(folder / name).strip() for name in limits)
            # "max": none
            limit = min((int(text) for text in texts if text.isdigit()), default=None)
            if limit is not None and used.isdigit():
                statistics = dict(map(str.split, _read(folder / "memory.stat").splitlines()))
                free = sum(int(statistics.get(name, 0)) for name in cached)
                yield limit, max(0, int(used) - free)


def _meminfo(name: str, root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
