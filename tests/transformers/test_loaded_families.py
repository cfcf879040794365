"""Families that no model of `test_transformers_oracle` is of: ktk loads their experts.

Most of their classes take no other implementation, or have several parts with experts.

Each family's own block of experts is made with random weights, written as its checkpoints have
them, and compared in float64.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from loaded import LAYER, Case, E, H, I, K, Tensors, check, known, under
from torch.nn import functional
from transformers.models.beam.modeling_beam import BeamExperts
from transformers.models.dbrx.modeling_dbrx import DbrxExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts
from transformers.models.jetmoe.modeling_jetmoe import JetMoeMoE
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
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
    return cast(torch.Tensor, (block(x[None]) - block.bias)[0])


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
    tensors: Tensors = {}
    for e in range(E):
        gate, up = block.gate_up_proj[e].chunk(2)
        parts = {"gate": gate, "up": up, "down": block.down_proj[e]}
        tensors |= {f"{prefix}{e}.{part}_proj.weight": one for part, one in parts.items()}
    return tensors


def eager(config: dict[str, Any]) -> SimpleNamespace:
    """Return a configuration, for blocks that take other implementations."""
    return SimpleNamespace(**config, _experts_implementation="eager")


# Inkling-2 adds experts up in float32, and Beam computes gates so: a few roundings of values below
# 8, which sums of 32 carry on.
IN_FLOAT32 = 2**-18
LLAMA: dict[str, Any] = {
    "hidden_size": H,
    "intermediate_size": I,
    "intermediate_size_mlp": 2 * I,
    "num_local_experts": E,
    "num_experts_per_tok": K,
}


def llama(block: Any, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Call the block as its layer does: all tokens for each expert, times their routing weights."""
    weights = torch.zeros(len(x), E, dtype=x.dtype).scatter(1, ids, w)
    rows = x.repeat(E, 1) * weights.T.reshape(-1, 1)
    result: torch.Tensor = block(rows).reshape(E, *x.shape).sum(0)
    return result


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
    "llama-4": Case(
        lambda: Llama4TextExperts(transformers.Llama4TextConfig(**LLAMA)),
        under("language_model.model.layers.1.feed_forward.experts."),
        {"model_type": "llama4", "text_config": known(transformers.Llama4TextConfig, **LLAMA)},
        llama,
    ),
    "inkling-2": Case(
        lambda: Inkling2Experts(
            transformers.Inkling2TextConfig(**INKLING | {"experts_implementation": "eager"})
        ),
        inkling,
        known(transformers.Inkling2TextConfig, **INKLING),
        rounding=IN_FLOAT32,
    ),
    "beam": Case(
        lambda: BeamExperts(cast(Any, eager(OMNI))),
        lambda block: each(block, "model.layers.1.mlp.experts."),
        OMNI | {"model_type": "beam"},
        rounding=IN_FLOAT32,
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
}


@pytest.mark.parametrize("name", CASES)
def test_experts_are_loaded_and_computed_as_their_family_does(name: str, tmp_path: Path) -> None:
    check(name, CASES[name], tmp_path)
    if CASES[name].module in ("encoder", "decoder"):
        both = r"under .*coder\..* and under .*coder\."
        with pytest.raises(ktk.errors.CheckpointError, match=both):
            ktk.MoE.from_checkpoint(tmp_path, LAYER)
