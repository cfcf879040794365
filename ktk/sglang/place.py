"""Which CPUs ktk's workers have in one of SGLang's processes."""

from __future__ import annotations

from ktk._core import WorkerPool
from ktk.hosts.pool import worker_pool


def pool_here() -> WorkerPool:
    """Return the workers of this process: those of one machine share its CPUs evenly."""
    from sglang.srt.runtime_context import get_parallel, get_server_args

    arguments = get_server_args()
    ranks = max(int(arguments.tp_size) // max(int(arguments.nnodes), 1), 1)
    return worker_pool(int(get_parallel().tp_rank) % ranks, ranks)
