"""Experts, and dense layers in codes, of vLLM's models on ktk's kernels; docs/vllm.md tells users.

vLLM calls `register` in each of its processes, by the entry point "ktk" of "vllm.general_plugins".
Importing this package imports no vLLM.

`choice` says when ktk takes a model over, `config` is vLLM's configuration of a model that it
takes. `experts` and `linears` are the layers, which pack tensors as vLLM loads them. `activation`
says which function experts compute, `place` which CPUs a worker process has. `zero_experts` routes
tokens on CPUs where some experts return what goes in.
"""

from __future__ import annotations

import logging

from ktk.system import let_openmp_sleep

_log = logging.getLogger("vllm.ktk")


def register() -> None:
    """Add ktk to vLLM; with another vLLM than this was written for, say so and leave it alone."""
    from ktk.hosts.choice import Mode
    from ktk.vllm import choice

    if choice.mode() is Mode.NEVER:
        return
    try:
        from ktk.vllm import config, experts, zero_experts

        config.register()
        if choice.mode() is Mode.ALWAYS:
            experts.register()
            let_openmp_sleep()
        zero_experts.register()
    except (ImportError, AttributeError, TypeError) as error:
        _log.warning(
            "this version of vLLM has its layers of experts elsewhere than ktk looks for them, and "
            "computes them itself: %s",
            error,
        )
