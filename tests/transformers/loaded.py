"""What a checkpoint of a family is, and how what ktk makes of it is compared in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import ktk
from ktk.checkpoint.open import open_checkpoint
from ktk.testing import bounds
from ktk.testing.reference import Expert, bounded_layer

E, K, H, I, TOKENS = 4, 2, 64, 32, 9  # noqa: E741 - the names of the tables
LAYER = 1
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A family: its block of experts, its tensors, how the block is called, and its config.json.

    What the block computes in float64 is within `rounding` of what the definition does: by default
    sums of 64 values below 2, in any order, over three products.
    """

    make: Callable[[], torch.nn.Module]
    stored: Callable[[torch.nn.Module], Tensors]
    config: dict[str, Any]
    call: Callable[..., torch.Tensor] = lambda block, x, ids, w: block(x, ids, w)
    module: str | None = None
    top_k: int = K
    more: Tensors = field(default_factory=dict)
    backend: str = "BF16"
    rounding: float = 2**-40


def under(prefix: str) -> Callable[[torch.nn.Module], Tensors]:
    """Name a block's tensors as they are, behind a prefix."""
    return lambda block: {f"{prefix}{name}": one for name, one in block.state_dict().items()}


def known(kind: Any, **options: Any) -> dict[str, Any]:
    """Return config.json as transformers writes it."""
    return dict(json.loads(kind(**options).to_json_string(use_diff=False)))


OTHER = {"encoder": "decoder", "decoder": "encoder", "thinker": "talker", "talker": "thinker"}


def _cut(name: str, weight: torch.Tensor, by: int) -> torch.Tensor:
    """Leave out a part of the intermediate size."""
    return (weight[:, : I // by] if "down" in name else weight[: I // by]) if by > 1 else weight


def check(name: str, case: Case, folder: Path) -> None:
    """Write a checkpoint, load it, and compare it with the block."""
    torch.manual_seed(0)
    block = case.make().eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) * H**-0.5 * 1.5)
    block.bfloat16()
    tensors = {key: one.contiguous() for key, one in case.stored(block).items()}
    others = {}
    if case.module:  # the same names on the other side, with other weights
        other = OTHER[case.module]
        smaller = 2 if other in ("thinker", "talker") else 1
        others = {
            key.replace(case.module, other): 2 * _cut(key, one, smaller)
            for key, one in tensors.items()
        }
    save_file(tensors | others | case.more, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(case.config))

    x = torch.randn(TOKENS, H).bfloat16().double()
    weights, ids = torch.rand(TOKENS, E).topk(case.top_k)
    with torch.no_grad():
        exact = case.call(block.double(), x, ids, weights.double()).numpy()
    with open_checkpoint(folder, module=case.module) as checkpoint:
        assert checkpoint.layers() == [LAYER]
        layer = checkpoint.layer(LAYER)
        read = [Expert.of(layer.values(e).arrays()) for e in range(E)]
    moe = ktk.Model.from_checkpoint(folder, case.backend, module=case.module)[LAYER]
    got = moe(x.float(), ids, weights).numpy()
    [variant] = [one for one in moe.backend.variants if one.name == moe.variant]
    bounded = bounded_layer(
        x.numpy(),
        ids.numpy(),
        weights.double().numpy(),
        read,
        moe.config,
        (variant.act,) * 3,
        moe.shard_widths,
    )
    np.testing.assert_allclose(bounded.value, exact, rtol=0, atol=case.rounding)
    bounds.check(got, bounded.value, bounded.error, name)
