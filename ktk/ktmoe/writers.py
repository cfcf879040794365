"""Experts for a GPU that computes a whole layer: the checkpoint's own bytes, cut for its ranks.

A serving engine gives addresses of CPU memory, four lists with one entry for each GPU. With
``I_r = moe_intermediate_size / gpu_tp_count``, rank r gets, row-major,

==============  ===================  ===================  =================  ==============
method          w13                  w13 scale            w2                 w2 scale
==============  ===================  ===================  =================  ==============
BF16            bf16 [2 I_r, H]      none (0)             bf16 [H, I_r]      none (0)
FP8             e4m3 [2 I_r, H]      f32 [2 I_r/128,      e4m3 [H, I_r]      f32 [H/128,
                                     H/128]                                  I_r/128]
FP8_PERCHANNEL  e4m3 [2 I_r, H]      f32 [2 I_r]          e4m3 [H, I_r]      f32 [H]
RAWINT4         4 bits [2 I_r, H/2]  bf16 [2 I_r, H/gs]   4 bits [H, I_r/2]  bf16 [H, I_r/gs]
MXFP4           e2m1 [2 I_r, H/2]    bf16 [2 I_r, H/32]   e2m1 [H, I_r/2]    bf16 [H, I_r/32]
MXFP8           e4m3 [2 I_r, H]      ue8m0 [2 I_r, H/32]  e4m3 [H, I_r]      ue8m0 [H, I_r/32]
==============  ===================  ===================  =================  ==============

where w13 has rows ``[r I_r, (r+1) I_r)`` of gate, then the same rows of up, and w2 the columns of
these numbers of down; of two 4-bit elements in a byte, the even column is the low one.
"""

from __future__ import annotations

from collections.abc import Sequence

from ktk import _core
from ktk.moe import MoE

# (element, scale) of what can be written: the formats of checkpoints that GPUs compute with.
_WRITTEN = {("bf16", "none"), ("e4m3", "f32"), ("e4m3", "ue8m0"), ("u4", "bf16"), ("e2m1", "ue8m0")}


def submit_write(
    moe: MoE,
    gpu_tp_count: int,
    expert_id: int,
    w13_weight_ptrs: Sequence[int],
    w13_scale_ptrs: Sequence[int],
    w2_weight_ptrs: Sequence[int],
    w2_scale_ptrs: Sequence[int],
) -> _core.Job:
    """Queue writing one expert to the GPUs' buffers, which must stay until the job has ended."""
    stored = moe.format
    if stored is None:
        raise RuntimeError("no expert is loaded")
    if not 0 <= expert_id < moe.config.num_experts:
        raise IndexError(f"expert {expert_id} is not one of {moe.config.num_experts}")
    if (stored.element, stored.scale) not in _WRITTEN or stored.zero != "none":
        raise ValueError(
            f"{moe.backend.name} stores {stored}, which is no checkpoint's format that a GPU "
            "takes; BF16, FP8, RAWINT4 and MXFP4 weights can be written"
        )
    scaled = stored.scale != "none"
    pointers = {
        "w13_weight_ptrs": w13_weight_ptrs,
        "w13_scale_ptrs": w13_scale_ptrs,
        "w2_weight_ptrs": w2_weight_ptrs,
        "w2_scale_ptrs": w2_scale_ptrs,
    }
    for name, given in pointers.items():
        if len(given) != gpu_tp_count:
            raise ValueError(f"{name} has {len(given)} addresses, gpu_tp_count is {gpu_tp_count}")
        if not all(given) and (scaled or "scale" not in name):
            raise ValueError(f"{name} has an address of 0, but {stored} needs memory there")
    # Engines stage the scales of MXFP4 as bf16, those of MXFP8 as exponents.
    wide = stored.element == "e2m1"
    ranks = list(zip(*pointers.values(), strict=True))
    return _core.submit_write(moe._core, expert_id, ranks, wide)
