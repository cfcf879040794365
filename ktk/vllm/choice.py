"""When ktk takes a model over: when it is asked to, and where vLLM itself could not start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ktk.hosts.choice import Mode, OnceLog, mode_of
from ktk.hosts.stored import refused, roles_of
from ktk.system import cpu_flags, let_openmp_sleep

#: What `--quantization` calls ktk.
METHOD = "ktk"
say_once = OnceLog("vllm.ktk")


def mode() -> Mode:
    """Return when ktk is to compute, by the variable KTK_VLLM; see `mode_of`."""
    return mode_of("KTK_VLLM")


def takes_over(quantization: Mapping[str, Any], asked: str | None, on_cpu: bool) -> bool:
    """Whether ktk is to load a quantised model.

    Parameters
    ----------
    quantization
        The quantization_config of the checkpoint.
    asked
        What the user gave as `--quantization`.
    on_cpu
        Whether vLLM computes on CPUs.
    """
    taken = _taken(quantization, asked, on_cpu)
    if taken:
        let_openmp_sleep()  # in the processes of workers, which are not there yet
    return taken


def _taken(quantization: Mapping[str, Any], asked: str | None, on_cpu: bool) -> bool:
    if asked == METHOD:
        return True
    method = quantization.get("quant_method")
    if asked not in (None, method) or mode() is Mode.NEVER:
        return False
    # vLLM's kernels for weights in codes are written with AMX.
    lacks = on_cpu and "amx_tile" not in cpu_flags()
    if roles_of(quantization) is None:
        why = refused(quantization, "vLLM")
        if why and (lacks or mode() is Mode.ALWAYS):
            say_once(f"ktk does not compute {why} (if vLLM cannot)")
        return False
    if mode() is Mode.ALWAYS:
        return True
    if not lacks:
        return False
    say_once(
        f"ktk computes what this model stores as {method}: vLLM has no kernels for that on a CPU "
        "without AMX (KTK_VLLM=0 leaves it to vLLM)"
    )
    return True
