"""The CPU's instruction sets, what hides some of them, and what this build makes of them."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence

from ktk import _core, system
from ktk.cli.health.finding import NOTE, OK, PROBLEM, WARNING, Finding
from ktk.cli.health.machine import Machine
from ktk.cli.report import report
from ktk.errors import SettingError
from ktk.registry import providers

_CPUINFO = "proc/cpuinfo"


def cpu(machine: Machine) -> Iterator[Finding]:
    """Name the CPU, and say whether the kernels can run on it."""
    sets = ", ".join(machine.detected) or "none"
    text = f"{_core.cpu_model()}; instruction sets that ktk uses: {sets}"
    if platform.machine() == "x86_64" and "avx2" not in machine.detected:
        yield Finding(
            "CPU", PROBLEM, text, "ktk needs AVX2; a virtual machine may hide it: pass the host CPU"
        )
        return
    yield Finding("CPU", OK, text)
    if forced := os.environ.get("KTK_ISA_FORCE"):
        yield Finding(
            "KTK_ISA_FORCE",
            NOTE,
            f"{forced}: ktk uses that whether this CPU has it or not",
            "unset it, except under an emulator: code that a CPU lacks ends the process",
        )
    try:
        allowed = _core.allowed_isa()
    except SettingError as error:
        variable = str(error).partition(" ")[0]
        yield Finding(variable, PROBLEM, str(error), f"unset {variable}, or name one of those")
        return
    if withheld := [isa for isa in machine.detected if isa not in allowed]:
        text = f"keeps ktk from using {', '.join(withheld)}"
        evidence = f"KTK_ISA={os.environ.get('KTK_ISA', '')}"
        yield Finding("KTK_ISA", WARNING, text, "unset it for full speed", evidence)
    if slow := _core.slow_isa():
        yield Finding(
            "CPU",
            NOTE,
            f"is faster without {', '.join(slow)}: variants that need it run where they are named",
        )
    if os.environ.get("KTK_GUARD", "0") not in ("", "0"):
        yield Finding(
            "KTK_GUARD",
            WARNING,
            "each piece of memory is filled before each use and ends at a protected page",
            "unset it: guard mode is for tests",
            f"KTK_GUARD={os.environ['KTK_GUARD']}",
        )


#: CPUs by vendor, family and models: what these have unless something hides it. In decimal, as
#: /proc/cpuinfo has them; from Linux, arch/x86/include/asm/intel-family.h and kernel/cpu/amd.c.
_AMX = (
    ("GenuineIntel", 6, (143, 173, 174, 207)),
)  # Sapphire Rapids, Granite Rapids, Emerald Rapids
_AVX512 = (
    *_AMX,
    ("GenuineIntel", 6, (85, 106, 108)),  # Skylake-SP to Cooper Lake, Ice Lake-SP and -D
    ("AuthenticAMD", 25, (*range(16, 32), *range(96, 128), *range(160, 176))),  # Zen 4
    ("AuthenticAMD", 26, range(256)),  # Zen 5
)


def amx(machine: Machine) -> Iterator[Finding]:
    """Tell a CPU without AMX from one that hides it, and from Linux that withholds it."""
    if platform.machine() != "x86_64":
        return
    flags = system.cpu_flags(machine.root)
    if {"amx_int8", "amx_bf16"} & set(machine.detected):
        yield Finding("AMX", OK, "the CPU has it and Linux grants it")
    elif "amx_tile" in flags:
        yield Finding(
            "AMX",
            WARNING,
            "the CPU has it, but Linux does not grant the tile registers to this process",
            "needs Linux 5.16 or newer, and a container or sandbox that lets "
            "arch_prctl(ARCH_REQ_XCOMP_PERM) pass; until then AVX-512 is used",
            "/proc/cpuinfo: flags with amx_tile",
        )
    elif _is_one_of(_AMX, machine):
        yield _hidden("AMX", "amx_tile", machine)
    else:
        yield Finding("AMX", NOTE, "this CPU has none (Intel has since Sapphire Rapids, 2023)")


def avx512(machine: Machine) -> Iterator[Finding]:
    """Say so where a CPU has AVX-512, and does not show it."""
    flags = system.cpu_flags(machine.root)
    if flags and "avx512f" not in flags and _is_one_of(_AVX512, machine):
        yield _hidden("AVX-512", "avx512f", machine)


def _hidden(name: str, flag: str, machine: Machine) -> Finding:
    model = machine.entry(_CPUINFO, "model name") or "this CPU"
    if "hypervisor" in system.cpu_flags(machine.root):
        who, advice = "the virtual machine hides it", "pass the host CPU (qemu: -cpu host)"
    else:
        who, advice = (
            "firmware or kernel hide it",
            "see the firmware's setup, and clearcpuid= in /proc/cmdline",
        )
    number = machine.entry(_CPUINFO, "model")
    return Finding(
        name,
        WARNING,
        f"{model} has it, but {who}",
        advice,
        f"/{_CPUINFO}: model {number}, no {flag} among flags",
    )


def _is_one_of(models: tuple[tuple[str, int, Sequence[int]], ...], machine: Machine) -> bool:
    vendor, family, model = (
        machine.entry(_CPUINFO, name) for name in ("vendor_id", "cpu family", "model")
    )
    return any(
        vendor == one and family == str(two) and model in map(str, numbers)
        for one, two, numbers in models
    )


#: Detected for backends of others: no kernel of ktk's own is compiled for these.
_UNUSED = {"avx512_fp16", "sve"}


def kernels(machine: Machine) -> Iterator[Finding]:
    """Compare what the CPU has with what this build of ktk has kernels for."""
    try:
        _core.allowed_isa()
        _core.prefetch()
    except SettingError:
        return  # `cpu` or `prefetch` has said so, and no backend would load
    infos = [info for info in providers() if info.distribution == "ktk"]
    used = {isa for info in infos for one in report(info).variants for isa in one.required_isa}
    if missing := [isa for isa in machine.detected if used and isa not in used | _UNUSED]:
        yield Finding(
            "build",
            WARNING,
            f"this build of ktk has no kernels for {', '.join(missing)}, which the CPU has",
            "install a wheel, or build with gcc 12, clang 16 or newer",
            "ktk backends NAME: the instruction sets of its variants",
        )


def prefetch(machine: Machine) -> Iterator[Finding]:
    """Say what tells kernels how far ahead to fetch weights."""
    setting = os.environ.get("KTK_PREFETCH")
    try:
        row = _core.prefetch_row()
        policy = _core.prefetch()
    except SettingError as error:
        if setting and str(error).startswith("KTK_PREFETCH"):  # else `cpu` has said so
            yield Finding(
                "KTK_PREFETCH", PROBLEM, str(error), "unset it, or write it like one of those"
            )
        return
    if setting:
        text = f"{setting}: weights are fetched ahead by {policy}"
        yield Finding("KTK_PREFETCH", NOTE, text, f"unset it for what this CPU has, {row}")
    elif row == "default":
        yield Finding(
            "prefetch",
            NOTE,
            f"no measured policy for this CPU: default ({policy})",
            "python tools/bench/prefetch, of ktk's sources, measures one in minutes",
        )
    else:
        yield Finding("prefetch", OK, f"policy for this CPU: {row} ({policy})")
