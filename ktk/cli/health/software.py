"""What ktk works with: drivers, packages and backends."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from ktk import _core, system
from ktk.cli.health.finding import NOTE, OK, PROBLEM, Finding, count
from ktk.cli.health.machine import Machine
from ktk.cli.report import report
from ktk.cli.version import package_version
from ktk.errors import BackendUnsupported, SettingError
from ktk.registry import providers

_PACKAGES = ("torch", "numpy", "safetensors", "gguf", "transformers")


def gpu(machine: Machine) -> Iterator[Finding]:
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
    yield Finding("GPU", OK, f"{name} with {count(driver.devices, 'device')}")


def packages(machine: Machine) -> Iterator[Finding]:
    """Name the versions of what ktk works with."""
    found = ", ".join(
        f"{name} {number}" if (number := package_version(name)) else f"no {name}"
        for name in ("ktk", *_PACKAGES)
    )
    yield Finding("packages", OK, f"Python {platform.python_version()}, {found}")


def backends(machine: Machine) -> Iterator[Finding]:
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
