"""When ktk computes layers of SGLang on a CPU: when asked, and where SGLang has no kernels."""

from __future__ import annotations

from ktk.hosts.choice import Mode, OnceLog, mode_of

say_once = OnceLog("sglang.ktk")


def mode() -> Mode:
    """Return when ktk is to compute, by the variable KTK_SGLANG; see `mode_of`."""
    return mode_of("KTK_SGLANG")


def takes_over() -> bool:
    """Whether ktk is to compute what it can in SGLang's engine on CPUs."""
    from sglang.srt.utils import cpu_has_amx_support

    if mode() is Mode.ALWAYS:
        return True
    # Its kernels are written with AMX; without them it computes experts of floats in a loop of
    # torch's operations, and weights in codes not at all.
    if mode() is Mode.NEVER or cpu_has_amx_support():
        return False
    say_once(
        "ktk computes experts, and dense layers in codes: SGLang has no kernels for them on a CPU "
        "without AMX (KTK_SGLANG=0 leaves them to SGLang)"
    )
    return True
