"""What a layer of vLLM has to know of its process: its number in graphs, and its workers."""

from __future__ import annotations

import hashlib
from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_world_group

from ktk._core import WorkerPool
from ktk.hosts.pool import worker_pool

# Behind the numbers that layers of other hosts count from 0.
_FIRST = 1 << 32


def number_of(layer_name: str) -> int:
    """Return the number of a layer for `ktk.hosts`.

    vLLM keeps compiled graphs on disk, so that a layer has to have the same one in each process.
    """
    config: Any = get_current_vllm_config_or_none()
    model = config.model_config.model if config is not None and config.model_config else ""
    digest = hashlib.blake2b(f"{model}:{layer_name}".encode(), digest_size=7).digest()
    return _FIRST + int.from_bytes(digest)


def pool_here() -> WorkerPool:
    """Return the workers of this process."""
    config: Any = get_current_vllm_config_or_none()
    parallel = None if config is None else config.parallel_config
    if parallel is None:
        return worker_pool(0, 1)
    ranks = int(parallel.local_world_size)
    rank = int(get_world_group().local_rank) % ranks
    # Replicas of a model on one machine are processes, too.
    replicas, replica = parallel.data_parallel_size_local, parallel.data_parallel_rank_local
    return worker_pool((replica or 0) * ranks + rank, ranks * max(int(replicas or 1), 1))


def loads_dummies() -> bool:
    """Whether vLLM makes weights up instead of reading them."""
    config: Any = get_current_vllm_config_or_none()
    return config is not None and config.load_config.load_format == "dummy"
