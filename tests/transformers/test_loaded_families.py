"""Families that no model of `test_transformers_oracle` is of: ktk loads their experts.

Most of their classes take no other implementation, or have several parts with experts.

Each family's own block of experts is made with random weights, written as its checkpoints have
them, and compared in float64. Where transformers has no such class, the formula stands here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch.nn import functional
from transformers.models.beam.modeling_beam import BeamExperts
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeExperts
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextExperts,
    Qwen3OmniMoeThinkerTextExperts,
)
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersExperts,
)

import ktk
from ktk.checkpoint.open import open_checkpoint
from ktk.testing import bounds
from ktk.testing.reference import Expert, bounded_layer

E, K, H, I, TOKENS = 4, 2, 64, 32, 9  # noqa: E741 - the names of the tables
LAYER = 1
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A family: its block of experts, its tensors, how the block is called, and its config.json."""

    make: Callable[[], torch.nn.Module]
    stored: Callable[[torch.nn.Module], Tensors]
    config: dict[str, Any]
    call: Callable[..., torch.Tensor] = lambda block, x, ids, w: block(x, ids, w)
    module: str | None = None
    top_k: int = K
    more: Tensors = field(default_factory=dict)


def under(prefix: str) -> Callable[[torch.nn.Module], Tensors]:
    """Name a block's tensors as they are, behind a prefix."""
    return lambda block: {f"{prefix}{name}": one for name, one in block.state_dict().items()}


def known(kind: Any, **options: Any) -> dict[str, Any]:
    """Return config.json as transformers writes it."""
    return json.loads(kind(**options).to_json_string(use_diff=False))


DBRX: dict[str, Any] = {
    "d_model": H,
    "ffn_config": {
        "ffn_hidden_size": I,
        "hidden_size": H,
        "moe_num_experts": E,
        "moe_top_k": K,
    },
}
JETMOE: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": I,
    "num_local_experts": E,
    "num_experts_per_tok": K,
}
NLLB: dict[str, Any] = {
    "d_model": H,
    "encoder_ffn_dim": I,
    "decoder_ffn_dim": I,
    "num_experts": E,
}
SWITCH: dict[str, Any] = {"d_model": H, "d_ff": I, "num_experts": E, "num_heads": 2}


def jetmoe(block: Any, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Call the block with chosen experts in the place of its router's, without the layer's bias."""
    order = ids.flatten().argsort(stable=True)
    sizes = ids.flatten().bincount(minlength=E).tolist()
    block.router.forward = lambda _: (order, order // K, w.flatten()[order], sizes, None)
    return (block(x[None]) - block.bias)[0]


def nllb(block: Any, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Call the block, which multiplies what experts return by what is left without dropout."""
    result: torch.Tensor = block(x, ids, w) / (1 - block.moe_token_dropout)
    return result


def switch(block: Any, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = block(x, functional.one_hot(ids, E), w)
    return result


def step(block: Any) -> Tensors:
    gate, up = block.gate_up_proj.chunk(2, dim=1)
    parts = {"gate": gate, "up": up, "down": block.down_proj}
    return {f"model.layers.1.moe.{part}_proj.weight": one for part, one in parts.items()}


STEP = {
    "model_type": "step3p5",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_local_experts": E,
    "num_experts_per_tok": K,
    "hidden_act": "silu",
}


INKLING: dict[str, Any] = {
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "mlp_gate_softcap": 0.7,
}


def inkling(block: Any) -> Tensors:
    """Write gate and up in turn, as published."""
    both = torch.stack(block.gate_up_proj.chunk(2, dim=1), dim=2).flatten(1, 2)
    prefix = "model.llm.layers.1.mlp.experts."
    return {f"{prefix}w13_weight": both, f"{prefix}w2_weight": block.down_proj}


OMNI: dict[str, Any] = {
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_experts_per_tok": K,
    "hidden_act": "silu",
}
# The other part is smaller, so that experts of neither are taken for those of the other.
SMALL = OMNI | {"moe_intermediate_size": I // 2}


def omni(part: str) -> dict[str, Any]:
    other = {"thinker": "talker", "talker": "thinker"}[part]
    return {
        "model_type": "qwen3_omni_moe",
        f"{part}_config": {"text_config": OMNI},
        f"{other}_config": {"text_config": SMALL},
    }


def each(block: Any, prefix: str) -> Tensors:
    """Write a block's experts one by one, as published."""
    tensors = {}
    for e in range(E):
        gate, up = block.gate_up_proj[e].chunk(2)
        parts = {"gate": gate, "up": up, "down": block.down_proj[e]}
        tensors |= {f"{prefix}{e}.{part}_proj.weight": one for part, one in parts.items()}
    return tensors


def eager(config: dict[str, Any]) -> SimpleNamespace:
    """Return a configuration, for blocks that take other implementations."""
    return SimpleNamespace(**config, _experts_implementation="eager")


class SmallThinker(torch.nn.Module):
    """What SmallThinker computes: down (relu(gate x) * up x)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Parameter(torch.empty(E, I, H)) for _ in range(2))
        self.down = torch.nn.Parameter(torch.empty(E, H, I))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, chosen, weights in zip(x, ids.tolist(), w, strict=True):
            hidden = [torch.relu(self.gate[e] @ token) * (self.up[e] @ token) for e in chosen]
            each = [self.down[e] @ one for e, one in zip(chosen, hidden, strict=True)]
            rows.append(sum(weight * one for weight, one in zip(weights, each, strict=True)))
        return torch.stack(rows)  # type: ignore[arg-type]


def smallthinker(block: Any) -> Tensors:
    return {
        f"model.layers.1.block_sparse_moe.experts.{e}.{part}.weight": getattr(block, part)[e]
        for part in ("gate", "up", "down")
        for e in range(E)
    }


CASES = {
    "dbrx": Case(
        lambda: DbrxExperts(transformers.DbrxConfig(**DBRX).ffn_config),
        under("transformer.blocks.1.ffn.experts."),
        known(transformers.DbrxConfig, **DBRX),
        lambda block, x, ids, w: block(x, ids, w)[:, 0],
    ),
    "jetmoe": Case(
        lambda: JetMoeMoE(transformers.JetMoeConfig(**JETMOE)),
        under("model.layers.1.mlp."),
        known(transformers.JetMoeConfig, **JETMOE),
        jetmoe,
        # Experts of attention, which are something else.
        more={
            "model.layers.1.self_attention.experts.input_linear.weight": torch.rand(E, 16, H),
            "model.layers.1.self_attention.experts.output_linear.weight": torch.rand(E, H, 16),
        },
    ),
    **{
        f"nllb-{side}": Case(
            lambda: NllbMoeExperts(transformers.NllbMoeConfig(**NLLB), I),
            under(f"model.{side}.layers.1.ffn.experts."),
            known(transformers.NllbMoeConfig, **NLLB),
            nllb,
            side,
        )
        for side in ("encoder", "decoder")
    },
    "switch": Case(
        lambda: SwitchTransformersExperts(transformers.SwitchTransformersConfig(**SWITCH)),
        under("encoder.block.1.layer.1.mlp.experts."),
        known(transformers.SwitchTransformersConfig, **SWITCH),
        switch,
        "encoder",
        1,
    ),
    "inkling-2": Case(
        lambda: Inkling2Experts(
            transformers.Inkling2TextConfig(**INKLING, experts_implementation="eager")
        ),
        inkling,
        known(transformers.Inkling2TextConfig, **INKLING),
    ),
    "beam": Case(
        lambda: BeamExperts(eager(OMNI)),
        lambda block: each(block, "model.layers.1.mlp.experts."),
        OMNI | {"model_type": "beam"},
    ),
    **{
        f"qwen3-omni {part}": Case(
            lambda kind=kind: kind(eager(OMNI)),  # type: ignore[misc]
            lambda block, part=part: each(  # type: ignore[misc]
                block, f"{part}.model.layers.1.mlp.experts."
            ),
            omni(part),
            module=part,
        )
        for part, kind in (
            ("thinker", Qwen3OmniMoeThinkerTextExperts),
            ("talker", Qwen3OmniMoeTalkerTextExperts),
        )
    },
    "step-3.7": Case(
        lambda: Step3p7Experts(SimpleNamespace(**STEP)),
        step,
        STEP | {"swiglu_limits": [0.0, 0.0]},
    ),
    "step-3.7 with a limit": Case(
        lambda: Step3p7Experts(SimpleNamespace(**STEP), 0.5),
        step,
        STEP | {"swiglu_limits": [0.0, 0.5]},
    ),
    "smallthinker": Case(
        SmallThinker,
        smallthinker,
        {
            "model_type": "smallthinker",
            "hidden_size": H,
            "moe_ffn_hidden_size": I,
            "moe_num_primary_experts": E,
            "moe_num_active_primary_experts": K,
        },
    ),
}


OTHER = {"encoder": "decoder", "decoder": "encoder", "thinker": "talker", "talker": "thinker"}


def _cut(name: str, weight: torch.Tensor, by: int) -> torch.Tensor:
    """Leave out a part of the intermediate size."""
    return (weight[:, : I // by] if "down" in name else weight[: I // by]) if by > 1 else weight


@pytest.mark.parametrize("name", CASES)
def test_experts_are_loaded_and_computed_as_their_family_does(name: str, tmp_path: Path) -> None:
    case = CASES[name]
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
    save_file(tensors | others | case.more, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(case.config))

    x = torch.randn(TOKENS, H).bfloat16().double()
    weights, ids = torch.rand(TOKENS, E).topk(case.top_k)
    with torch.no_grad():
        exact = case.call(block.double(), x, ids, weights.double()).numpy()
    with open_checkpoint(tmp_path, module=case.module) as checkpoint:
        assert checkpoint.layers() == [LAYER]
        layer = checkpoint.layer(LAYER)
        read = [Expert.of(layer.values(e).arrays()) for e in range(E)]
    moe = ktk.MoE.from_checkpoint(tmp_path, LAYER, "BF16", module=case.module)
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
    # Both are float64: sums of 64 values below 2, in any order, over three products.
    # Inkling-2 adds experts up in float32, and Beam computes gates so: a few roundings of values
    # below 8, which sums of 32 carry on.
    exactly = 2**-18 if name in ("inkling-2", "beam") else 2**-40
    np.testing.assert_allclose(bounded.value, exact, rtol=0, atol=exactly)
    bounds.check(got, bounded.value, bounded.error, name)
    if case.module in ("encoder", "decoder"):
        both = r"under .*coder\..* and under .*coder\."
        with pytest.raises(ktk.errors.CheckpointError, match=both):
            ktk.MoE.from_checkpoint(tmp_path, LAYER)
