"""The kt_kernel of SGLang's wrapper of experts on CPU and GPU, where none is installed."""

from __future__ import annotations

import sys

from ktk import compat

#: Modules that remember whether they could import kt_kernel.
IMPORTERS = (
    "sglang.srt.layers.moe.kt_ep_wrapper",
    "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
)


def provide() -> None:
    """Make kt_kernel ktk, also for modules that looked for it before plug-ins were loaded."""
    if not compat.provide():
        return
    from ktk.ktmoe import KTMoEWrapper

    for name in IMPORTERS:
        module = sys.modules.get(name)
        if module is not None:
            module.__dict__.update(KTMoEWrapper=KTMoEWrapper, KTRANSFORMERS_AVAILABLE=True)
