"""The interface of kt-kernel, for code that was written against it; README.md says what differs.

`wrapper` is `KTMoEWrapper`; `model` holds what the layers of one model share; `steps` runs a call
of a layer on the pool or on a CUDA stream; the rest is one idea each.
"""

from ktk.ktmoe.masks import generate_gpu_experts_masks
from ktk.ktmoe.model import ModelState
from ktk.ktmoe.wrapper import KTMoEWrapper

__all__ = ["KTMoEWrapper", "ModelState", "generate_gpu_experts_masks"]
