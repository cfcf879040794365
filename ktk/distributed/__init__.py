"""Experts of a layer divided over the ranks of a `torch.distributed` group; tokens travel.

::

    placement = Placement.contiguous(num_experts=128, ranks=dist.get_world_size())
    moe = ktk.MoE.from_checkpoint(path, layer, experts=placement.experts[dist.get_rank()])
    layer = ExpertParallel(moe, placement=placement)
    y = layer(hidden, topk_ids, topk_weights)       # the tokens of this rank

`docs/distributed.md` tells users. `placement` says which rank holds which expert and computes which
row, `expert_parallel` is the layer, and `split` and `shared` are its two ways of a call. `mesh` has
connections between all ranks, which `connect` makes, `watch` notices who is gone, and `frames` are
what is sent. `cpus` gives the processes of a machine CPUs of their own.
"""

from ktk.distributed.cpus import share_cpus
from ktk.distributed.expert_parallel import ExpertParallel
from ktk.distributed.failure import RankFailed
from ktk.distributed.placement import Placement

__all__ = ["ExpertParallel", "Placement", "RankFailed", "share_cpus"]
