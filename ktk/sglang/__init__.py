"""SGLang on ktk's kernels; docs/sglang.md tells users.

Mainline SGLang calls `register` in each of its processes, by the entry point "ktk" of
"sglang.srt.plugins". Importing this package imports no SGLang. sglang-kt has no plug-ins, and gets
ktk by `ktk compat`.

`hybrid` gives the wrapper of experts on CPU and GPU, behind the `--kt-...` options, its kt_kernel.
`engine` hooks ktk into the engine on CPUs: `experts`, `linears` and `zero_experts` are what its
hooks do, `choice` says when, and `place` which CPUs a process has.
"""

from __future__ import annotations

import logging

_log = logging.getLogger("sglang.ktk")


def register() -> None:
    """Add ktk to SGLang; with another SGLang than this was written for, say so and leave it."""
    from ktk.hosts.choice import Mode
    from ktk.sglang import choice

    if choice.mode() is Mode.NEVER:
        return
    from ktk.sglang import engine, hybrid

    hybrid.provide()
    try:
        engine.register()
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning(
            "this version of SGLang has its layers elsewhere than ktk looks for them, and computes "
            "them itself on a CPU: %s",
            error,
        )
