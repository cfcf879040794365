"""Which CPUs ktk's workers have in one of SGLang's processes."""

from __future__ import annotations

import os
from typing import Any

from ktk._core import WorkerPool
from ktk.hosts.pool import worker_pool

# Of this process when SGLang loads its plug-ins. Later it binds each thread of OpenMP to a CPU of
# its own, the one that loads the model among them, and no variable says to which.
_CPUS = frozenset(os.sched_getaffinity(0))


def pool_here() -> WorkerPool:
    """Return the workers of this process: those of one machine share its CPUs evenly.

    A machine has the ranks of some stages of the pipeline, or a part of those of one, and of each
    replica (data parallelism) as many. Attention by data parallelism has no processes of its own:
    versions that do not tell its groups from replicas call these by the same names.
    """
    from sglang.srt.runtime_context import get_parallel, get_server_args

    parallel, arguments = get_parallel(), get_server_args()
    nodes = max(int(arguments.nnodes), 1)
    ranks, stages = int(arguments.tp_size), _number(arguments, "pp_size", 1)
    stages_here = max(stages // nodes, 1)
    ranks_here = max(ranks // max(nodes // stages, 1), 1)
    here = stages_here * ranks_here
    mine = _number(parallel, "pp_rank", 0) % stages_here * ranks_here
    mine += int(parallel.tp_rank) % ranks_here
    if hasattr(parallel, "attn_dp_size"):
        replicas = _number(parallel, "dp_size", 1)
    else:
        is_attention = getattr(arguments, "enable_dp_attention", False)
        replicas = 1 if is_attention else _number(arguments, "dp_size", 1)
    replica = _number(parallel, "dp_rank", 0) % replicas
    return worker_pool(replica * here + mine, replicas * here, _CPUS)


def _number(owner: Any, name: str, default: int) -> int:
    """Return an attribute that other versions of SGLang may lack, or have no value for."""
    value = getattr(owner, name, None)
    return default if value is None else max(int(value), default)
