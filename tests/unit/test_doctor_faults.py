"""`ktk doctor` names what binds: faults planted one by one, and a machine that has none."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from pathlib import Path

import planted_machine as planted
import pytest
from planted_machine import CPU, CPUS, GROUP, NODE, frequency, plant, process, stat

from ktk.cli import health
from ktk.cli.health.finding import NOTE, OK, WARNING, in_the_way, numbers
from ktk.cli.health.machine import Machine

THP = "sys/kernel/mm/transparent_hugepage/enabled"
STATUS = planted.healthy()["proc/self/status"]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KTK_THREADS", "KTK_GUARD", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@dataclass
class Fault:
    """What is planted, and what has to be said: the resource, and parts of each sentence."""

    subject: str
    text: str
    evidence: str
    advice: str
    changed: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    cpus: list[int] | None = None
    detected: tuple[str, ...] = ("avx2", "avx512", "amx_int8", "amx_bf16")


BUSY = process(77, "stress", ticks=100)
BUSIER = process(77, "stress", ticks=100 + 16 * 45)
FAULTS = {
    "others use the CPUs": Fault(
        "oversubscription",
        "other processes use 90% of the CPUs that ktk may use, most of it stress (process 77)",
        "/proc/stat: 720 of 800 ticks busy",
        "end them",
        changed=BUSY,
        later={"proc/stat": stat(dict.fromkeys(CPUS, 45), passed=50), **BUSIER},
    ),
    "more workers than CPUs": Fault(
        "oversubscription",
        "64 workers wait for each other on 16 CPUs",
        "KTK_THREADS=64",
        "ask for 8",
        environment={"KTK_THREADS": "64"},
    ),
    "torch's threads stay busy": Fault(
        "oversubscription",
        "torch's threads stay busy",
        "OMP_WAIT_POLICY=active",
        "OMP_WAIT_POLICY=passive",
        environment={"OMP_WAIT_POLICY": "active"},
    ),
    "more workers than cores": Fault(
        "SMT",
        "16 workers share the multipliers of 8 cores",
        "KTK_THREADS=16",
        "ask for 8",
        environment={"KTK_THREADS": "16"},
    ),
    "two threads of one core": Fault(
        "SMT",
        "the 2 CPUs that this process may use are hardware threads of 1 core, and 7 cores are left",
        f"/{CPU}/cpu3/topology/thread_siblings_list: 3,11",
        "taskset -c 0-1",
        cpus=[3, 11],
    ),
    "others on the same cores": Fault(
        "SMT",
        "other processes use 80% of CPUs 8-15, hardware threads of the cores",
        "/proc/stat: 320 of 400 ticks busy",
        "other cores",
        cpus=list(range(8)),
        later={"proc/stat": stat(dict.fromkeys(range(8, 16), 40), passed=50)},
    ),
    "a mask": Fault(
        "CPU mask",
        "this process may use 3 of 8 physical cores",
        "/proc/self/status: 0-2",
        "taskset",
        cpus=[0, 1, 2],
    ),
    "a quota": Fault(
        "CPU quota",
        "the cgroup's quota pays for 2.5 of 8 physical cores",
        f"/{GROUP}/cpu.max: 250000 100000, and in cpu.stat nr_throttled 30 of 40 periods",
        "--cpus",
        changed={
            f"{GROUP}/cpu.max": "250000 100000\n",
            f"{GROUP}/cpu.stat": "nr_periods 40\nnr_throttled 30\n",
        },
    ),
    "a quota around the group": Fault(
        "CPU quota",
        "pays for 2 of 8",
        "/sys/fs/cgroup/system.slice/cpu.max: 200000 100000",
        "--cpus",
        changed={"sys/fs/cgroup/system.slice/cpu.max": "200000 100000\n"},
    ),
    "a quota of version 1": Fault(
        "CPU quota",
        "pays for 4 of 8",
        "/sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us: 400000 100000",
        "--cpus",
        changed={
            "proc/self/cgroup": "4:cpu,cpuacct:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us": "400000\n",
            "sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
        },
    ),
    "stolen time": Fault(
        "stolen time",
        "the hypervisor gives 20% of the CPU time",
        "/proc/stat: 160 of 800 ticks stolen",
        "instance",
        later={"proc/stat": stat(stolen=10, passed=50)},
    ),
    "a node without memory": Fault(
        "NUMA",
        "without memory: 1",
        f"/{NODE}/has_memory: 0",
        "numactl",
        changed={f"{NODE}/has_memory": "0\n"},
    ),
    "memory of one node, threads on both": Fault(
        "NUMA",
        "memory comes from node 0 only: workers of node 1",
        "/proc/self/status: Mems_allowed_list 0",
        "cpuset.mems",
        changed={"proc/self/status": STATUS.replace("list:\t0-1", "list:\t0")},
    ),
    "a node that is full": Fault(
        "NUMA",
        "node 1 has 1.0 GiB left, 1% of its memory: weights of its workers have no place elsewhere",
        f"/{NODE}/node1/meminfo: MemFree and pages of files {1 << 20} kB",
        "numastat",
        changed={f"{NODE}/node1/meminfo": planted.node_meminfo(1, 1 << 20)},
    ),
    "huge pages are off": Fault(
        "huge pages",
        "transparent huge pages: never",
        f"/{THP}: always madvise [never]",
        "write madvise",
        changed={THP: "always madvise [never]\n"},
    ),
    "huge pages are off for this process": Fault(
        "huge pages",
        "switched transparent huge pages off",
        "/proc/self/status: THP_enabled 0",
        "PR_SET_THP_DISABLE",
        changed={"proc/self/status": STATUS.replace("THP_enabled:\t1", "THP_enabled:\t0")},
    ),
    "memory kept for huge pages": Fault(
        "memory",
        "100.0 GiB are reserved for huge pages that nobody uses",
        "/proc/meminfo: HugePages_Free 51200",
        "vm.nr_hugepages=0",
        changed={"proc/meminfo": planted.meminfo(reserved=51200)},
    ),
    "governor powersave": Fault(
        "frequency",
        "governor powersave holds 16 CPUs (0-15) at the lowest frequency",
        f"/{CPU}/cpu0/cpufreq/scaling_governor: powersave",
        "cpupower",
        changed=frequency(scaling_driver="acpi-cpufreq"),
    ),
    "preference for saving power": Fault(
        "frequency",
        "16 CPUs (0-15) are told to save power",
        f"/{CPU}/cpu0/cpufreq/energy_performance_preference: power",
        "performance",
        changed=frequency(energy_performance_preference="power"),
    ),
    "a limit of one CPU's frequency": Fault(
        "frequency",
        "1 CPU (5) may run at 1.2 of 3.8 GHz",
        f"/{CPU}/cpu5/cpufreq/scaling_max_freq: 1200000",
        "--max 3800000kHz",
        changed={f"{CPU}/cpu5/cpufreq/scaling_max_freq": "1200000\n"},
    ),
    "no turbo": Fault(
        "frequency",
        "switched off",
        f"/{CPU}/intel_pstate/no_turbo: 1",
        f"echo 0 > /{CPU}/intel_pstate/no_turbo",
        changed={f"{CPU}/intel_pstate/no_turbo": "1\n"},
    ),
    "no boost": Fault(
        "frequency",
        "switched off",
        f"/{CPU}/cpufreq/boost: 0",
        f"echo 1 > /{CPU}/cpufreq/boost",
        changed={f"{CPU}/cpufreq/boost": "0\n"},
    ),
    "memory in swap": Fault(
        "swap",
        "8.0 GiB of 8.0 GiB are in use: what lies there is read from a disk; "
        "python (process 88) has 7.0 GiB in it",
        "/proc/meminfo: SwapFree 0 kB",
        "swapoff",
        changed={
            # A machine of 100 GiB: 8 of them are a share that counts.
            "proc/meminfo": planted.meminfo(50 << 20, 0, total=100 << 20),
            **process(88, "python", swapped=7 << 20),
        },
    ),
    "pages on their way to swap": Fault(
        "swap",
        "4000 pages went to or from swap",
        "/proc/vmstat: pswpin and pswpout grew by 4000",
        "swapoff",
        later={"proc/vmstat": "pswpin 3000\npswpout 4000\n"},
    ),
    "no memory left": Fault(
        "memory",
        "256.0 GiB, of which 2.0 GiB can be had; a database (process 99) has 240.0 GiB",
        f"/proc/meminfo: MemAvailable {2 << 20} kB",
        "ktk inspect",
        changed={
            "proc/meminfo": planted.meminfo(2 << 20),
            **process(99, "a database", resident=240 << 20),
        },
    ),
    "no memory left in the cgroup": Fault(
        "memory",
        "of which 1.0 GiB can be had; the cgroup's limit is 32.0 GiB",
        f"/{GROUP}/memory.high: {32 << 30}, of which {31 << 30} used",
        "--memory",
        changed={
            f"{GROUP}/memory.high": f"{32 << 30}\n",
            f"{GROUP}/memory.current": f"{31 << 30}\n",
        },
    ),
    "AMX without permission": Fault(
        "AMX",
        "Linux does not grant the tile registers",
        "/proc/cpuinfo: flags with amx_tile",
        "ARCH_REQ_XCOMP_PERM",
        detected=("avx2", "avx512"),
    ),
    "AMX hidden by a virtual machine": Fault(
        "AMX",
        "A fine CPU has it, but the virtual machine hides it",
        "/proc/cpuinfo: model 143, no amx_tile among flags",
        "-cpu host",
        changed={"proc/cpuinfo": planted.cpuinfo("fpu avx2 avx512f hypervisor")},
        detected=("avx2", "avx512"),
    ),
    "AVX-512 hidden by a virtual machine": Fault(
        "AVX-512",
        "A fine CPU has it, but the virtual machine hides it",
        "/proc/cpuinfo: model 17, no avx512f among flags",
        "-cpu host",
        changed={"proc/cpuinfo": planted.cpuinfo("fpu avx2 hypervisor", "AuthenticAMD", 25, 17)},
        detected=("avx2",),
    ),
    "AVX-512 switched off": Fault(
        "AVX-512",
        "firmware or kernel hide it",
        "/proc/cpuinfo: model 106, no avx512f among flags",
        "clearcpuid",
        changed={"proc/cpuinfo": planted.cpuinfo("fpu avx2", model=106)},
        detected=("avx2",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_the_one_thing_in_the_way(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    for variable, value in fault.environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    machine = plant(
        tmp_path / "root", fault.changed, fault.later, cpus=fault.cpus, detected=fault.detected
    )
    found = health.examine(machine, health.RESOURCES)
    [warning] = [one for one in found if one.state not in (OK, NOTE)]
    assert (warning.subject, warning.state) == (fault.subject, WARNING)
    assert fault.text in warning.text
    assert fault.evidence in warning.evidence
    assert fault.advice in warning.advice
    assert in_the_way(found) == [fault.subject]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        # What a virtual machine shows: no frequencies, and Linux without swap or cgroups.
        dict.fromkeys(frequency(), "")
        | {"proc/self/cgroup": "", "proc/meminfo": planted.meminfo(swap_free=8 << 20)},
        frequency(scaling_driver="acpi-cpufreq", scaling_governor="schedutil"),
        frequency(scaling_driver="amd-pstate-epp", energy_performance_preference="balance_power"),
        # A quota that pays for all cores, and a limit that leaves memory.
        {f"{GROUP}/cpu.max": "800000 100000\n", f"{GROUP}/memory.max": f"{64 << 30}\n"},
        {f"{CPU}/cpufreq/boost": "1\n", THP: "[always] madvise never\n"},
    ],
    ids=["bare metal", "virtual", "acpi", "amd", "container", "boost"],
)
def test_a_healthy_machine_is_no_cause_for_alarm(
    changed: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("KTK_THREADS", "8")
    found = health.examine(plant(tmp_path / "root", changed), health.RESOURCES)
    assert in_the_way(found) == []
    assert {one.state for one in found} <= {OK, NOTE}
    subjects = {one.subject for one in found}
    assert {"workers", "NUMA", "memory", "swap", "huge pages", "frequency"} <= subjects


def test_desktop_cpus_without_avx512_hide_nothing(tmp_path: Path) -> None:
    """An Alder Lake, and a Zen 3 of the same family as Zen 4."""
    for vendor, family, model in (("GenuineIntel", 6, 151), ("AuthenticAMD", 25, 1)):
        text = planted.cpuinfo("fpu avx2 hypervisor", vendor, family, model)
        machine = plant(tmp_path / str(model), {"proc/cpuinfo": text}, detected=("avx2",))
        assert in_the_way(health.examine(machine, health.RESOURCES)) == []


def test_a_build_without_kernels_for_this_cpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in (Machine(), Machine(detected=["avx2", "avx512_fp16"])):
        assert [*health.isa.kernels(machine)] == []
    [finding] = health.isa.kernels(Machine(detected=["avx2", "avx1024"]))
    assert (finding.subject, finding.state) == ("build", "warning")
    assert "no kernels for avx1024" in finding.text


def test_lists_are_written_as_linux_reads_them() -> None:
    assert numbers([8, 0, 1, 2, 3, 10, 11]) == "0-3,8,10-11"
    assert numbers([]) == ""
