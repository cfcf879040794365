"""Whether CPUs may run as fast as they can."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ktk.cli.health.finding import OK, WARNING, Finding, count, numbers
from ktk.cli.health.machine import CPUS, Machine

# With these drivers the CPU chooses, and the governor powersave is the usual, not the slow one.
_CHOOSES_ITSELF = {"intel_pstate", "amd-pstate-epp", "amd_pstate_epp"}
_PERFORMANCE = "as root: cpupower frequency-set -g performance"
#: From which share of the highest frequency on a limit is none: steps are coarse.
_NEARLY = 0.95


def frequency(machine: Machine) -> Iterator[Finding]:
    """Look at governors, limits of the frequency, and turbo."""
    found = [*_governors(machine), *_limits(machine), *_turbo(machine)]
    yield from found
    if not found:
        governor = machine.text(_path(machine.cpus[0], "scaling_governor"))
        text = f"governor {governor}, no limit" if governor else "not set by Linux (no cpufreq)"
        yield Finding("frequency", OK, text)


def _governors(machine: Machine) -> Iterator[Finding]:
    def slow(cpu: int) -> bool:
        driver = machine.text(_path(cpu, "scaling_driver"))
        governor = machine.text(_path(cpu, "scaling_governor"))
        return governor == "powersave" and driver not in _CHOOSES_ITSELF

    yield from _where(
        machine,
        "scaling_governor",
        slow,
        "governor powersave holds {cpus} at the lowest frequency",
        _PERFORMANCE,
    )

    def frugal(cpu: int) -> bool:
        driver = machine.text(_path(cpu, "scaling_driver"))
        preference = machine.text(_path(cpu, "energy_performance_preference"))
        return driver in _CHOOSES_ITSELF and preference == "power"

    yield from _where(
        machine,
        "energy_performance_preference",
        frugal,
        "{cpus} are told to save power rather than be fast",
        "as root: cpupower set --epp performance, or powerprofilesctl set performance",
    )


def _limits(machine: Machine) -> Iterator[Finding]:
    def limited(cpu: int) -> bool:
        limit, highest = _range(machine, cpu)
        return 0 < limit < _NEARLY * highest

    cpus = [cpu for cpu in machine.cpus if limited(cpu)]
    if not cpus:
        return
    limit, highest = _range(machine, cpus[0])
    yield Finding(
        "frequency",
        WARNING,
        f"{_name(cpus)} may run at {limit / 1e6:.1f} of {highest / 1e6:.1f} GHz",
        f"as root: cpupower frequency-set --max {highest}kHz",
        f"/{_path(cpus[0], 'scaling_max_freq')}: {limit}",
    )


def _turbo(machine: Machine) -> Iterator[Finding]:
    for path, off in ((f"{CPUS}/intel_pstate/no_turbo", "1"), (f"{CPUS}/cpufreq/boost", "0")):
        if machine.text(path) == off:
            on = "0" if off == "1" else "1"
            yield Finding(
                "frequency",
                WARNING,
                "frequencies above the nominal one (turbo, boost) are switched off",
                f"as root: echo {on} > /{path}, unless the firmware has it off",
                f"/{path}: {off}",
            )


def _where(
    machine: Machine, file: str, slow: Callable[[int], bool], text: str, advice: str
) -> Iterator[Finding]:
    cpus = [cpu for cpu in machine.cpus if slow(cpu)]
    if cpus:
        path = _path(cpus[0], file)
        evidence = f"/{path}: {machine.text(path)}"
        yield Finding("frequency", WARNING, text.format(cpus=_name(cpus)), advice, evidence)


def _range(machine: Machine, cpu: int) -> tuple[int, int]:
    """Return the highest frequency that Linux allows a CPU, and that of the CPU, in kHz."""
    limit = machine.number(_path(cpu, "scaling_max_freq")) or 0
    return limit, machine.number(_path(cpu, "cpuinfo_max_freq")) or 0


def _name(cpus: list[int]) -> str:
    return f"{count(len(cpus), 'CPU')} ({numbers(cpus)})"


def _path(cpu: int, name: str) -> str:
    return f"{CPUS}/cpu{cpu}/cpufreq/{name}"
