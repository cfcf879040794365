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
NVFP4           e2m1 [2 I_r, H/2]    bf16 [2 I_r, H/16]   e2m1 [H, I_r/2]    bf16 [H, I_r/16]
MXFP8           e4m3 [2 I_r, H]      ue8m0 [2 I_r, H/32]  e4m3 [H, I_r]      ue8m0 [H, I_r/32]
==============  ===================  ===================  =================  ==============

where w13 has rows ``[r I_r, (r+1) I_r)`` of gate, then the same rows of up, and w2 the columns of
these numbers of down; of two 4-bit elements in a byte, the even column is the low one.

The scales of NVFP4 are the only numbers here that a checkpoint does not have: each is the E4M3
scale times the f32 of its matrix, rounded to f32 and then to bf16. That is what kt-kernel 0.7.2
keeps of them when it loads (NVFP4SafeTensorLoader), and what the class that computes its method
NVFP4 (AVX2MXFP4_MOE with group_size 16) writes. Its SGLang, sglang-kt 0.7.2, does not know the
method: it takes ModelOpt's tensors for FP8_PERCHANNEL and has a byte for each scale, which these
writes would overrun. In a process that has loaded it, NVFP4 is refused.

Addresses say nothing about sizes: the engine has allocated what its method and its own model mean.
So a method writes its own format, and only where the weights were loaded in it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence

from ktk import _core
from ktk._core import Format
from ktk.ktmoe.arguments import at_least, integer
from ktk.moe import MoE
from ktk.names import KT_WRITTEN

#: Formats of gate, up and down.
Formats = tuple[Format, Format, Format]


# Of sglang-kt: allocates what is written to.
_SGLANG = "sglang.srt.layers.moe.kt_ep_wrapper"


def method_of(formats: Formats) -> str | None:
    """Return the method that has these formats, if any."""
    # By their words: groups of what has no scales mean nothing.
    words = {str(part) for part in formats}
    return next(
        (name for name, own in KT_WRITTEN.items() if words in ({str(f)} for f in own)), None
    )


def stored_in(moe: MoE) -> Formats | None:
    """Return what gate, up and down are stored as; None before an expert is loaded."""
    formats = (moe.format, moe.up_format, moe.down_format)
    gate, up, down = formats
    return None if gate is None or up is None or down is None else (gate, up, down)


def described(formats: Formats) -> str:
    """Name the formats of gate, up and down, without repetition."""
    return ", ".join(dict.fromkeys(str(part) for part in formats))


def check_method(method: str, stored: Formats, given: Formats | None) -> None:
    """Refuse to write weights that are not, or were not, of the method's own format.

    Parameters
    ----------
    method : str
        As the layer was made with.
    stored, given : three formats
        What the layer holds, and what it was loaded from; None: nobody knows.
    """
    method = method.upper()
    if method not in KT_WRITTEN:
        why = f"has no writer; {', '.join(KT_WRITTEN)} have one"
    elif (found := method_of(stored)) != method:
        own = KT_WRITTEN[method][0]
        why = f"writes {own}, but the layer holds {described(stored)}"
        why += f", which is method {found}" if found else ""
    elif method == "NVFP4" and _SGLANG in sys.modules:
        why = "writes scales as bf16, and sglang-kt has allocated a byte for each"
    elif given is None:
        why = (
            "writes what a checkpoint holds, but weight_path is a folder that ktk convert made, "
            "which does not say what its checkpoint held; give the checkpoint itself"
        )
    elif described(given) != described(stored):
        why = (
            f"writes what a checkpoint holds, but the layer was made of {described(given)}, and "
            f"holds {described(stored)}"
        )
    else:
        return
    raise NotImplementedError(
        f"weights for GPUs: method {method} {why}. Start the engine without "
        "--kt-gpu-prefill-token-threshold, which asks for them"
    )


def submit_write(
    moe: MoE,
    method: str,
    given: Formats | None,
    gpu_tp_count: int,
    expert_id: int,
    w13_weight_ptrs: Sequence[int],
    w13_scale_ptrs: Sequence[int],
    w2_weight_ptrs: Sequence[int],
    w2_scale_ptrs: Sequence[int],
) -> _core.Job:
    """Queue writing one expert to the GPUs' buffers, which must stay until the job has ended."""
    gpu_tp_count = at_least("gpu_tp_count", gpu_tp_count, 1)
    expert_id = integer(expert_id)
    if not isinstance(expert_id, int) or not 0 <= expert_id < moe.config.num_experts:
        raise IndexError(f"expert {expert_id} is not one of {moe.config.num_experts}")
    stored = stored_in(moe)
    if stored is None:
        raise ValueError(f"expert {expert_id} is not loaded")
    check_method(method, stored, given)
    scaled = stored[0].scale != "none"
    pointers = {
        "w13_weight_ptrs": w13_weight_ptrs,
        "w13_scale_ptrs": w13_scale_ptrs,
        "w2_weight_ptrs": w2_weight_ptrs,
        "w2_scale_ptrs": w2_scale_ptrs,
    }
    lists = []
    for name, given_addresses in pointers.items():
        try:
            addresses = [operator.index(address) for address in given_addresses]
        except TypeError:
            raise TypeError(
                f"{name} must be a list of addresses, got {given_addresses!r}"
            ) from None
        lists.append(addresses)
        if len(addresses) != gpu_tp_count:
            raise ValueError(
                f"{name} has {len(addresses)} addresses, gpu_tp_count is {gpu_tp_count}"
            )
        if any(not 0 <= address < 1 << 64 for address in addresses):
            raise ValueError(f"{name} has an address that is none: {addresses}")
        if not all(addresses) and (scaled or "scale" not in name):
            raise ValueError(f"{name} has an address of 0, but {stored[0]} needs memory there")
    # Engines stage the scales of 4-bit floats as bf16, those of MXFP8 as exponents.
    wide = stored[0].element == "e2m1"
    ranks = list(zip(*lists, strict=True))
    return _core.submit_write(moe._core, expert_id, ranks, wide)
