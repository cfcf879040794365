"""What is known of a call that was submitted, and of what it leaves to the next layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ktk import _core
from ktk.ktmoe.staging import Staging


@dataclass(frozen=True)
class Step:
    """A call that was submitted."""

    call: _core.AsyncCall
    out: torch.Tensor  # in CPU memory
    staging: Staging | None  # where a GPU's tensors are on their way
    stream: int
    device: torch.device  # of the inputs, and of the result
    dtype: torch.dtype  # of the result

    @property
    def on_pool(self) -> bool:
        """Whether no stream is involved."""
        return not self.stream and self.device.type == "cpu"


@dataclass(frozen=True)
class Carried:
    """Sums of deferred experts, f32 [tokens, hidden_size], and who computes them."""

    layer_idx: int
    sums: torch.Tensor
    carry: _core.Carry
    captured: bool
    step: Step | None = None
