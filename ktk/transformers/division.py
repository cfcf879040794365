"""Experts that processes divide, as transformers' own plan of expert parallelism has it.

Transformers hooks the forward of experts, to mask or send tokens around it. What ktk packs does
that itself, so its modules get their own forward back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ktk.distributed import ExpertParallel, Placement, share_cpus
from ktk.moe import MoE
from ktk.transformers.modules import Experts


@dataclass(frozen=True)
class Division:
    """How many processes divide the experts of each layer, and which of them this one is."""

    rank: int
    size: int

    @classmethod
    def of(cls, model: Any) -> Division | None:
        """Return how a model that is being loaded is divided; None if it is not.

        Processes of one machine divide its CPUs, too.

        Raises
        ------
        ValueError
            In a way that ktk does not serve.
        """
        config = getattr(model.config, "distributed_config", None)
        if config is None:
            return None
        if config.ep_size < 2 or config.ep_size != config.tp_size or config.dp_size > 1:
            raise ValueError(
                "ktk divides whole experts over processes that share their tokens, and nothing "
                "else: load the model with distributed_config=DistributedConfig(tp_size=N, "
                "ep_size=N), or without distributed_config, tp_plan and tp_size"
            )
        share_cpus()
        return cls(dist.get_rank() % config.ep_size, config.ep_size)

    def experts(self, count: int) -> tuple[int, ...]:
        """Return the experts of this process, of so many."""
        return Placement.contiguous(count, self.size).experts[self.rank]

    def check(self, experts: Sequence[Experts], taken: Sequence[Experts]) -> None:
        """Refuse a model whose experts are not all packed from files: none else are divided."""
        if len(taken) < len(experts) or not taken:
            raise ValueError(
                "ktk divides experts over processes where it reads all of them from files, and "
                f"here it reads {len(taken)} of {len(experts)} layers: load the model without "
                'distributed_config, or without experts_implementation="ktk"'
            )

    def divide(self, moe: MoE, module: Any, model: Any) -> ExpertParallel:
        """Return the divided layer of a module, and take out what transformers hooked into that."""
        vars(module).pop("forward", None)
        group = model._mesh_manager.get_mesh("ep").get_group()
        return ExpertParallel(moe, group, shared=True)
