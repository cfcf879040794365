"""Families that transformers has no class of: their files as published, and their formulas.

Names, nesting and formats are those of the published checkpoints, with what stands beside experts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loaded import Case, E, H, I, K, Tensors, check
from torch.nn.functional import silu

Act = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# What the four bits of E2M1 mean, the sign last; half of them are the others' opposites.
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


class Experts(torch.nn.Module):
    """Computes down @ act(gate @ x, up @ x), one token and one expert after the other."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.gate, self.up = (torch.nn.Parameter(torch.empty(E, I, H)) for _ in range(2))
        self.down = torch.nn.Parameter(torch.empty(E, H, I))
        self.act = act

    def forward(self, x: torch.Tensor, ids: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, chosen, weights in zip(x, ids.tolist(), w, strict=True):
            hidden = [self.act(self.gate[e] @ token, self.up[e] @ token) for e in chosen]
            each = [self.down[e] @ one for e, one in zip(chosen, hidden, strict=True)]
            rows.append(sum(weight * one for weight, one in zip(weights, each, strict=True)))
        return torch.stack(rows)


def smallthinker(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.relu(gate) * up


def kimi_k3(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


def deepseek_v41(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return silu(gate.clamp(max=10)) * up.clamp(-10, 10)


def plain(block: Any, prefix: str) -> Tensors:
    return {
        f"{prefix}{e}.{part}.weight": getattr(block, part)[e]
        for part in ("gate", "up", "down")
        for e in range(E)
    }


def mxfp4(block: Any, prefix: str, codes: str, scales: str, kinds: tuple[Any, Any]) -> Tensors:
    """Round a block's weights to MXFP4, large enough for clamps and caps, and write them so."""
    tensors = {}
    for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2")):
        weights = getattr(block, part)
        groups = 8 * weights.detach().float().unflatten(2, (-1, 32))
        exponents = (groups.abs().amax(3) / 6).log2().ceil()
        steps = torch.exp2(exponents)[..., None]
        nearest = ((groups / steps).abs()[..., None] - E2M1).abs().argmin(4)
        values = E2M1[nearest] * groups.sign() * steps
        weights.data = values.flatten(2).to(weights.dtype)
        assert torch.equal(weights.data.float(), values.flatten(2))
        fours = (nearest + 8 * (groups < 0)).flatten(2).to(torch.uint8)
        packed = fours[..., ::2] | fours[..., 1::2] << 4
        for e in range(E):
            tensors[f"{prefix}{e}.{name}.{codes}"] = packed[e].view(kinds[0])
            of_group = (exponents[e] + 127).to(torch.uint8)
            tensors[f"{prefix}{e}.{name}.{scales}"] = of_group.view(kinds[1])
    return tensors


def shared(prefix: str, names: tuple[str, str, str], width: int, kind: Any) -> Tensors:
    """Write the experts of all tokens, which are those of no router."""
    shapes = ((I, width), (I, width), (width, I))
    return {
        f"{prefix}{name}.weight": torch.ones(shape).to(kind)
        for name, shape in zip(names, shapes, strict=True)
    }


# moonshotai/Kimi-K3: experts of half the model's width, which the caller projects to and from.
KIMI = {
    "model_type": "kimi_linear",
    "hidden_size": 2 * H,
    "intermediate_size": 5 * I,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "num_experts": E,
    "num_experts_per_token": K,
    "num_shared_experts": 2,
    "moe_intermediate_size": I,
    "routed_expert_hidden_size": H,
    "latent_moe_use_norm": True,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*"],
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": 32,
                    "symmetric": True,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
    },
}
KIMI_LAYER = "language_model.model.layers.1.block_sparse_moe."
# deepseek-ai/DeepSeek-V4.1-Flash: experts in FP4, all else in FP8 by 32 x 32.
DEEPSEEK = {
    "model_type": "deepseek_v41_text",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_hidden_layers": 2,
    "hidden_act": "silu",
    "swiglu_limit": 10.0,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "num_experts_per_tok": K,
    "num_nextn_predict_layers": 1,
    "dspark_n_routed_experts": E // 2,
    "dspark_num_experts_per_tok": 1,
    "engram_layer_ids": [1],
}
CASES = {
    "smallthinker": Case(
        lambda: Experts(smallthinker),
        lambda block: plain(block, "model.layers.1.block_sparse_moe.experts."),
        {
            "model_type": "smallthinker",
            "hidden_size": H,
            "moe_ffn_hidden_size": I,
            "moe_num_primary_experts": E,
            "moe_num_active_primary_experts": K,
        },
    ),
    "kimi-k3": Case(
        lambda: Experts(kimi_k3),
        lambda block: mxfp4(
            block,
            f"{KIMI_LAYER}experts.",
            *("weight_packed", "weight_scale", (torch.uint8, torch.uint8)),
        ),
        {"model_type": "kimi_k3", "text_config": KIMI, "vision_config": {"hidden_size": 7}},
        more={
            f"{KIMI_LAYER}gate.weight": torch.ones(E, 2 * H),
            f"{KIMI_LAYER}gate.e_score_correction_bias": torch.ones(E),
            f"{KIMI_LAYER}routed_expert_down_proj.weight": torch.ones(H, 2 * H),
            f"{KIMI_LAYER}routed_expert_norm.weight": torch.ones(H),
            f"{KIMI_LAYER}routed_expert_up_proj.weight": torch.ones(2 * H, H),
            "language_model.model.layers.0.mlp.gate_proj.weight": torch.ones(5 * I, 2 * H),
            "language_model.model.layers.1.self_attn.A_log": torch.ones(4),
            **shared(
                f"{KIMI_LAYER}shared_experts.",
                ("gate_proj", "up_proj", "down_proj"),
                2 * H,
                torch.bfloat16,
            ),
        },
        backend="MXFP4",
        rounding=2**-32,  # of values below 2^9
    ),
    "deepseek-v4.1": Case(
        lambda: Experts(deepseek_v41),
        lambda block: mxfp4(
            block,
            "layers.1.ffn.experts.",
            *("weight", "scale", (torch.int8, torch.float8_e8m0fnu)),
        ),
        {
            "model_type": "deepseek_v41",
            "text_config": DEEPSEEK,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
        },
        more={
            "layers.1.ffn.gate.weight": torch.ones(E, H),
            "layers.1.ffn.gate.bias": torch.ones(E),
            "layers.1.engram.embed.weight": torch.ones(7, H).to(torch.float8_e4m3fn),
            "vision.blocks.1.attn.wqkv.weight": torch.ones(7, 7),
            **shared("layers.1.ffn.shared_experts.", ("w1", "w3", "w2"), H, torch.float8_e4m3fn),
            **{
                f"mtp.0.ffn.experts.{e}.{name}.weight": torch.ones(rows, columns, dtype=torch.int8)
                for e in range(E // 2)
                for name, rows, columns in (("w1", I, H // 2), ("w3", I, H // 2), ("w2", H, I // 2))
            },
        },
        backend="MXFP4",
        rounding=2**-32,  # of values below 2^9
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_experts_are_loaded_and_computed_as_their_family_does(name: str, tmp_path: Path) -> None:
    check(name, CASES[name], tmp_path)
