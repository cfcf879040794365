"""A machine of files: two nodes, four cores each, two threads a core; nothing is wrong with it."""

from __future__ import annotations

from pathlib import Path

from ktk.cli.health.machine import Machine

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
GROUP = "sys/fs/cgroup/system.slice/ktk.service"
KIB_OF_NODE = 128 << 20
CORES = range(8)  # CPUs 8 to 15 are their second threads
CPUS = range(16)
FLAGS = "fpu avx2 avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16"


def meminfo(
    available: int = 200 << 20,
    swap_free: int = 7 << 20,
    reserved: int = 0,
    total: int = 2 * KIB_OF_NODE,
) -> str:
    """Return /proc/meminfo with 8 GiB of swap; sizes in KiB, and huge pages that are reserved."""
    return (
        f"MemTotal: {total} kB\nMemFree: {available // 2} kB\n"
        f"MemAvailable: {available} kB\nSwapTotal: {8 << 20} kB\nSwapFree: {swap_free} kB\n"
        f"HugePages_Total: {reserved}\nHugePages_Free: {reserved}\nHugepagesize: 2048 kB\n"
    )


def node_meminfo(node: int, free: int) -> str:
    """Return a node's part of it."""
    return (
        f"Node {node} MemTotal: {KIB_OF_NODE} kB\nNode {node} MemFree: {free // 2} kB\n"
        f"Node {node} Active(file): {free // 4} kB\nNode {node} Inactive(file): {free // 4} kB\n"
    )


def cpuinfo(
    flags: str = FLAGS, vendor: str = "GenuineIntel", family: int = 6, model: int = 143
) -> str:
    """Return /proc/cpuinfo, by default of a Sapphire Rapids."""
    return (
        f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: {model}\n"
        f"model name\t: A fine CPU\nflags\t\t: {flags}\n"
    )


def stat(busy: dict[int, int] | None = None, stolen: int = 0, passed: int = 0) -> str:
    """Return /proc/stat after some ticks, of which CPUs were busy, or others had them."""
    lines = ["cpu 1 0 1 1 0 0 0 0 0 0"]
    for cpu in CPUS:
        user = (busy or {}).get(cpu, 0)
        idle = passed - user - stolen
        lines.append(f"cpu{cpu} {1000 + user} 0 500 {90000 + idle} 10 0 5 {stolen} 0 0")
    return "\n".join(lines) + "\n"


def process(
    pid: int, name: str, ticks: int = 0, resident: int = 0, swapped: int = 0
) -> dict[str, str]:
    """Return the files of a process that has used so many ticks, and so many KiB."""
    times = f"S 1 1 1 0 -1 0 0 0 0 0 {ticks} 0 0 0 20 0 1 0 100"
    return {
        f"proc/{pid}/stat": f"{pid} ({name}) {times}\n",
        f"proc/{pid}/status": f"Name:\t{name}\nVmRSS:\t{resident} kB\nVmSwap:\t{swapped} kB\n",
    }


def frequency(**changed: str) -> dict[str, str]:
    """Return the files of cpufreq, with other texts for some of them."""
    usual = {
        "scaling_driver": "intel_pstate",
        "scaling_governor": "powersave",
        "energy_performance_preference": "balance_performance",
        "scaling_max_freq": "3800000",
        "cpuinfo_max_freq": "3800000",
    }
    return {
        f"{CPU}/cpu{cpu}/cpufreq/{name}": f"{text}\n"
        for cpu in CPUS
        for name, text in (usual | changed).items()
    }


def healthy() -> dict[str, str]:
    """Return all files, by their path below the root."""
    files = {
        f"{CPU}/online": "0-15\n",
        f"{CPU}/intel_pstate/no_turbo": "0\n",
        f"{NODE}/online": "0-1\n",
        f"{NODE}/has_memory": "0-1\n",
        f"{NODE}/node0/cpulist": "0-3,8-11\n",
        f"{NODE}/node1/cpulist": "4-7,12-15\n",
        f"{NODE}/node0/meminfo": node_meminfo(0, KIB_OF_NODE // 2),
        f"{NODE}/node1/meminfo": node_meminfo(1, KIB_OF_NODE // 3),
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/cpuinfo": cpuinfo(),
        "proc/meminfo": meminfo(),
        "proc/stat": stat(),
        "proc/vmstat": "nr_free_pages 7\npswpin 1000\npswpout 2000\n",
        "proc/self/status": "Name:\tktk\nTHP_enabled:\t1\nMems_allowed_list:\t0-1\n",
        "proc/self/cgroup": "0::/system.slice/ktk.service\n",
        f"{GROUP}/cpu.max": "max 100000\n",
        f"{GROUP}/cpu.stat": "usage_usec 1\nnr_periods 0\nnr_throttled 0\n",
        f"{GROUP}/memory.max": "max\n",
        f"{GROUP}/memory.high": "max\n",
        f"{GROUP}/memory.current": f"{1 << 30}\n",
        **process(101, "an (odd) editor", resident=1 << 20),
        **frequency(),
    }
    for core in CORES:
        for cpu in (core, core + 8):
            files[f"{CPU}/cpu{cpu}/topology/thread_siblings_list"] = f"{core},{core + 8}\n"
    return files


def plant(
    root: Path,
    changed: dict[str, str] | None = None,
    later: dict[str, str] | None = None,
    *,
    cpus: list[int] | None = None,
    detected: tuple[str, ...] = ("avx2", "avx512", "amx_int8", "amx_bf16"),
) -> Machine:
    """Write the files of the healthy machine, with some changed, below a root.

    `later` are files as they are after the pause between two samples of counters.
    """

    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write(healthy() | (changed or {}))
    usual = {"proc/stat": stat(dict.fromkeys(CPUS, 2), passed=50)}

    def pause(seconds: float) -> None:
        write(usual | (later or {}))

    return Machine(root, list(CPUS) if cpus is None else cpus, list(detected), pause)
