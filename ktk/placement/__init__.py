"""Which experts belong on a GPU: counts of how often each was chosen, masks of them, and files.

    save_counts("counts.json", model)              # after some traffic
    masks = place(load_counts("counts.json"), 512)  # 512 experts in all, those chosen most
    save_masks("gpu.json", masks)
    KTMoEWrapper(3, ..., gpu_experts_mask=load_masks("gpu.json")[3])

`ktk placement` does the same from the command line.
"""

from ktk.placement.counts import load_counts, save_counts
from ktk.placement.masks import STRATEGIES, load_masks, place, save_masks
from ktk.placement.sglang import save_for_sglang

__all__ = [
    "STRATEGIES",
    "load_counts",
    "load_masks",
    "place",
    "save_counts",
    "save_for_sglang",
    "save_masks",
]
