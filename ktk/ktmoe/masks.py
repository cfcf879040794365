"""Which experts live on the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from ktk.ktmoe.arguments import at_least

#: Names of the ways to choose experts for the GPU, as kt-kernel and SGLang have them.
STRATEGIES = ("frequency", "uniform", "front-loading", "random")


def generate_gpu_experts_masks(
    activation_freq: torch.Tensor | Sequence[Sequence[float]],
    num_gpu_experts: int,
    strategy: str = "frequency",
    *,
    seed: int = 42,
) -> torch.Tensor:
    """Choose experts of a model for the GPU, by default the most used ones.

    Parameters
    ----------
    activation_freq : array or lists [layers, experts]
        How often each expert was chosen; any unit. NaN is less than any number.
    num_gpu_experts : int
        Experts of all layers together that the GPU holds; clamped to [0, layers * experts].
    strategy : str
        As ``--kt-expert-placement-strategy`` of SGLang has them:

        - "frequency": the most used of all layers, which may get different numbers. Of equally used
          ones, those of earlier layers and lower numbers come first.
        - "uniform": the same number of each layer, the lowest; what is left over, one each of the
          first layers.
        - "front-loading": all of the first layer, then of the next, the last one's lowest.
        - "random": any of all layers, the same for the same seed.

        Only the first looks at more of `activation_freq` than its shape.
    seed : int
        Of "random".

    Returns
    -------
    tensor [layers, experts], bool, in CPU memory
        True: on the GPU.

    Notes
    -----
    All layers are layers of experts: SGLang's masks have rows for dense layers, too, all True.
    """
    try:
        frequency = torch.as_tensor(activation_freq, dtype=torch.float64, device="cpu").detach()
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"activation_freq must have a number for each expert of each layer: {error}"
        ) from None
    if frequency.ndim != 2:
        raise ValueError(f"activation_freq must be [layers, experts], got {list(frequency.shape)}")
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    layers, experts = frequency.shape
    count = min(max(int(num_gpu_experts), 0), layers * experts)
    if strategy == "uniform":
        each, over = divmod(count, max(layers, 1))
        numbers = (
            torch.full((layers, 1), each, dtype=torch.int64, device="cpu")
            + (torch.arange(layers, device="cpu") < over)[:, None]
        )
        return torch.arange(experts, device="cpu") < numbers
    mask = torch.zeros(layers * experts, dtype=torch.bool, device="cpu")
    if strategy == "frequency":
        flat = frequency.flatten().nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        mask[torch.argsort(flat, descending=True, stable=True)[:count]] = True
    elif strategy == "random":
        order = torch.randperm(
            mask.numel(), generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
        )
        mask[order[:count]] = True
    else:
        mask[:count] = True
    return mask.reshape(layers, experts)


def initial_mask(
    num_experts: int, mask: torch.Tensor | int | None, num_gpu_experts: int | None
) -> torch.Tensor:
    """Make a layer's mask from the arguments of either generation of the constructor.

    Until early 2026 an int said how many experts, from number 0 on, are on the GPU; since then a
    mask says which. The int came where the mask comes now, so that it may be found there.
    """
    # By position, in the old order of arguments.
    if isinstance(mask, Integral) and not isinstance(mask, bool):
        if num_gpu_experts not in (None, mask):
            raise ValueError(f"num_gpu_experts is given twice: {mask} and {num_gpu_experts}")
        mask, num_gpu_experts = None, int(mask)
    if num_gpu_experts is not None:
        num_gpu_experts = at_least("num_gpu_experts", num_gpu_experts, 0)
    if num_gpu_experts is not None and num_gpu_experts > num_experts:
        raise ValueError(
            f"num_gpu_experts must be between 0 and num_experts ({num_experts}), "
            f"got {num_gpu_experts}"
        )
    if mask is None:
        return torch.arange(num_experts, device="cpu") < (num_gpu_experts or 0)
    copied = check_mask(num_experts, mask)
    # 0 is the default of the callers that pass both.
    if num_gpu_experts and num_gpu_experts != int(copied.sum()):
        raise ValueError(
            f"gpu_experts_mask has {int(copied.sum())} experts on the GPU, but num_gpu_experts is "
            f"{num_gpu_experts}; give one of them"
        )
    return copied


def check_mask(num_experts: int, mask: Any) -> torch.Tensor:
    """Return a copy of a mask in CPU memory."""
    try:
        copied = torch.as_tensor(mask, device="cpu").detach().clone()
    except (RuntimeError, TypeError, ValueError):
        raise TypeError(
            f"gpu_experts_mask must be a bool tensor [{num_experts}], got {type(mask).__name__}"
        ) from None
    if list(copied.shape) != [num_experts] or copied.dtype not in (torch.bool, torch.uint8):
        raise ValueError(
            f"gpu_experts_mask must be a bool tensor [{num_experts}], "
            f"got {list(copied.shape)} {copied.dtype}"
        )
    return copied.bool().contiguous()
