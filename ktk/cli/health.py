"""`ktk doctor`: what this machine offers to ktk, what is in the way, and what to do about it."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ktk import _core, system
from ktk.cli.report import report
from ktk.cli.version import package_version
from ktk.errors import BackendUnsupported, SettingError
from ktk.registry import providers
from ktk.sizes import size_text

OK, NOTE, PROBLEM = "ok", "note", "problem"
_MARKS = {OK: "[green]ok[/]     ", NOTE: "[yellow]note[/]   ", PROBLEM: "[red]problem[/]"}
_PACKAGES = ("torch", "numpy", "safetensors", "gguf", "transformers")


@dataclass(frozen=True)
class Finding:
    """Something that was looked at: `state` is ok, note or problem, `advice` what can be done."""

    subject: str
    state: str
    text: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything. Nothing here raises: what cannot be looked at is a finding."""
    return [finding for check in CHECKS for finding in _guarded(check)]


def _guarded(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from check()
    except Exception as error:
        text = f"{check.__name__} fails: {type(error).__name__}: {error}"
        yield Finding("ktk", PROBLEM, text, "report this as a bug of ktk")


def show(*, as_json: bool) -> bool:
    """Print all findings; returns whether there is no problem among them."""
    findings = examine()
    well = all(finding.state != PROBLEM for finding in findings)
    if as_json:
        entries = [asdict(finding) for finding in findings]
        typer.echo(json.dumps({"ok": well, "findings": entries}, indent=2))
        return well
    # For a pipe a finding is a line, on a terminal it breaks between words.
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(_table(findings))
        return well
    console.soft_wrap = True
    for finding in findings:
        console.print(f"{_MARKS[finding.state]}  {finding.subject}: {escape(finding.text)}")
        if finding.advice:
            console.print(f"         [dim]-> {escape(finding.advice)}[/]")
    return well


def _table(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0))
    for finding in findings:
        text = f"{finding.subject}: {escape(finding.text)}"
        text += f"\n[dim]-> {escape(finding.advice)}[/]" if finding.advice else ""
        table.add_row(_MARKS[finding.state], text)
    return table


# --- checks -------------------------------------------------------------------------------------


def cpu() -> Iterator[Finding]:
    """Name the CPU, and say whether the kernels can run on it."""
    detected = _core.detected_isa()
    sets = ", ".join(detected) or "none"
    text = f"{_core.cpu_model()}; instruction sets that ktk uses: {sets}"
    if platform.machine() == "x86_64" and "avx2" not in detected:
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
    if withheld := [isa for isa in detected if isa not in allowed]:
        text = f"keeps ktk from using {', '.join(withheld)}"
        yield Finding("KTK_ISA", NOTE, text, "unset it for full speed")


def amx() -> Iterator[Finding]:
    """Tell a CPU without AMX from an operating system that withholds it."""
    if platform.machine() != "x86_64":
        return
    if {"amx_int8", "amx_bf16"} & set(_core.detected_isa()):
        yield Finding("AMX", OK, "the CPU has it and Linux grants it")
    elif "amx_tile" in system.cpu_flags():
        yield Finding(
            "AMX",
            NOTE,
            "the CPU has it, but Linux does not grant the tile registers to this process",
            "needs Linux 5.16 or newer, and a container or sandbox that lets "
            "arch_prctl(ARCH_REQ_XCOMP_PERM) pass; until then AVX-512 is used",
        )
    else:
        yield Finding("AMX", NOTE, "this CPU has none (Intel has since Sapphire Rapids, 2023)")


def prefetch() -> Iterator[Finding]:
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


def processors() -> Iterator[Finding]:
    """Say which CPUs and NUMA nodes the process may use, and what its cgroup pays for."""
    topology = _core.topology()
    nodes, quota = topology["nodes"], topology["quota"]
    cores = sum(len(node["cores"]) for node in nodes)
    threads = topology["default_threads"]
    text = f"{_count(threads, 'worker')} by default, for {_count(cores, 'physical core')}"
    advice = ""
    if quota and quota < cores:
        text += f"; the cgroup's quota pays for {quota}"
        advice = "raise the quota (docker --cpus, a Kubernetes CPU limit) to use all cores"
    yield Finding("workers", NOTE if advice else OK, text, advice)
    of_nodes = ", ".join(f"node {node['id']} with {_cores(node)}" for node in nodes)
    without = [str(node["id"]) for node in nodes if not node["has_memory"]]
    if without:
        yield Finding(
            "NUMA",
            NOTE,
            f"{of_nodes}; without memory: {', '.join(without)}",
            "workers there read from other nodes; a mask of CPUs (numactl, taskset) leaves them "
            "out",
        )
    elif len(nodes) > 1:
        yield Finding("NUMA", OK, f"{of_nodes}; weights are divided between them")
    else:
        yield Finding("NUMA", OK, of_nodes)


def memory() -> Iterator[Finding]:
    """Say how much memory there is, and how much of it the process may have."""
    total, free = system.total_memory(), system.available_memory()
    text = f"{size_text(total)}, of which {size_text(free)} can be had"
    limit = system.memory_limit()
    advice = ""
    if limit is not None:
        text += f"; the cgroup's limit is {size_text(limit)}"
        advice = "raise the limit (docker --memory, a Kubernetes memory limit) for larger models"
    yield Finding("memory", OK if limit is None else NOTE, text, advice)


def pages() -> Iterator[Finding]:
    """Say whether weights can lie in huge pages."""
    mode = system.huge_pages()
    if mode in ("always", "madvise"):
        yield Finding("huge pages", OK, f"transparent huge pages: {mode}")
        return
    yield Finding(
        "huge pages",
        NOTE,
        f"transparent huge pages: {mode or 'not in this kernel'}",
        "reading weights costs more without them: as root, write madvise to "
        "/sys/kernel/mm/transparent_hugepage/enabled",
    )


def gpu() -> Iterator[Finding]:
    """Say whether layers can be submitted on CUDA streams."""
    driver = system.cuda_driver()
    if driver is None:
        yield Finding("GPU", OK, "no CUDA driver (libcuda.so.1); ktk computes on the CPU")
        return
    name = f"CUDA driver {driver.version // 1000}.{driver.version % 1000 // 10}"
    if driver.error:
        yield Finding(
            "GPU",
            NOTE,
            f"{name}, but {driver.error}",
            "check that nvidia-smi works here, and that a container was started with its GPUs",
        )
        return
    yield Finding("GPU", OK, f"{name} with {_count(driver.devices, 'device')}")


def packages() -> Iterator[Finding]:
    """Name the versions of what ktk works with."""
    found = ", ".join(
        f"{name} {number}" if (number := package_version(name)) else f"no {name}"
        for name in ("ktk", *_PACKAGES)
    )
    yield Finding("packages", OK, f"Python {platform.python_version()}, {found}")


def backends() -> Iterator[Finding]:
    """Load every backend that is installed."""
    try:
        _core.allowed_isa()
        _core.prefetch()
    except SettingError:
        return  # `cpu` or `prefetch` has said so, and every backend would say the same
    runs = False
    for info in providers():
        entry = report(info)
        if entry.error and (not info.built or entry.error_kind == BackendUnsupported.__name__):
            # What a machine lacks, and a build leaves out, is no fault.
            text = f"{info.name} is not used here: {entry.brief}"
            yield Finding("backend", NOTE, text, entry.advice or "")
        elif entry.error:
            yield Finding("backend", PROBLEM, entry.error, entry.advice or "see ktk backends")
        else:
            runs = True
            yield Finding("backend", OK, f"{info.name} runs its variant {entry.runs}")
        if entry.rivals:
            others = ", ".join(entry.rivals)
            yield Finding(
                "backend",
                PROBLEM,
                f"{info.name} of {info.distribution} is also provided by {others}",
                "uninstall one, or pass distribution= to ktk.load_backend",
            )
    if not runs:
        yield Finding("backend", PROBLEM, "none can run here", "see ktk backends for the reasons")


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    cpu,
    amx,
    prefetch,
    processors,
    memory,
    pages,
    gpu,
    packages,
    backends,
)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _cores(node: dict[str, list[int]]) -> str:
    return _count(len(node["cores"]), "core")
