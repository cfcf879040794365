"""Transformers' own blocks of experts in float64, and ktk's from a checkpoint beside them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk.testing import bounds, reference

transformers = pytest.importorskip("transformers")

EXPERTS, TOP_K, TOKENS, LAYER = 5, 2, 19, 1
COMMON = {
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "num_experts_per_tok": TOP_K,
}
#: On the blocks of 128, and blocks that are filled in part; depths are whole groups of 32.
SIZES = [(128, 256), (160, 96), (288, 192)]
PARTS = ("gate", "up", "down")
Weights = dict[str, torch.Tensor]
each_size = pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size[0]}x{size[1]}")


def qwen3(hidden: int, inner: int) -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * inner,
        moe_intermediate_size=inner,
        num_experts=EXPERTS,
        norm_topk_prob=True,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(hidden: int, inner: int) -> Any:
    config = transformers.GptOssConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=EXPERTS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return transformers.GptOssForCausalLM(config)


@dataclass(frozen=True)
class Block:
    """A model's experts, and tokens for them."""

    model: Any
    experts: Any
    weights: list[Weights]
    hidden: torch.Tensor
    ids: torch.Tensor
    topk: torch.Tensor

    def expected(self, weights: list[Weights]) -> np.ndarray:
        """Compute the block of transformers in float64 with other weights [n, k]."""
        gate_up = self.experts.gate_up_proj
        with torch.no_grad():
            for e, expert in enumerate(weights):
                if gate_up.shape[1] == 2 * len(expert["gate"]):
                    gate_up[e] = torch.cat([expert["gate"], expert["up"]])
                    self.experts.down_proj[e] = expert["down"]
                else:  # gpt-oss: transposed, and alternating
                    gate_up[e, :, 0::2] = expert["gate"].T
                    gate_up[e, :, 1::2] = expert["up"].T
                    self.experts.down_proj[e] = expert["down"].T
            found = self.experts(self.hidden.double(), self.ids, self.topk.double())
        return np.asarray(found.numpy())


def block(make: Any, size: tuple[int, int]) -> Block:
    hidden, inner = size
    generator = torch.Generator().manual_seed(hidden + inner)
    model = make(hidden, inner)
    model.set_experts_implementation("eager")
    experts = model.model.layers[LAYER].mlp.experts.double()
    weights = [
        {
            part: torch.randn(shape, generator=generator).mul_(2 / shape[1] ** 0.5).bfloat16()
            for part, shape in zip(PARTS, [(inner, hidden)] * 2 + [(hidden, inner)], strict=True)
        }
        for _ in range(EXPERTS)
    ]
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    topk, ids = scores.softmax(-1).topk(TOP_K)
    tokens = torch.randn(TOKENS, hidden, generator=generator).bfloat16()
    return Block(model, experts, weights, tokens, ids, topk)


def check(
    folder: Path,
    made: Block,
    meant: list[Weights],
    names: tuple[str, ...],
    biases: list[dict[str, Any]] | None = None,
    **activation: Any,
) -> None:
    """Load the checkpoint into each backend, and compare weights and outputs of every variant."""
    expected = made.expected(meant)
    fields: list[dict[str, Any]] = [{part: w[part].numpy() for part in PARTS} for w in meant]
    experts = [
        reference.Expert(**one, **(biases[e] if biases else {})) for e, one in enumerate(fields)
    ]
    for name in names:
        for variant in ktk.load_backend(name).variants:
            if not variant.runnable:
                continue
            moe = ktk.MoE.from_checkpoint(folder, LAYER, name, variant=variant.name)
            assert replace(moe.config, **activation) == moe.config
            for e in range(EXPERTS):
                for part, got in zip(PARTS, moe.unpack_expert(e), strict=True):
                    # Bit by bit: what the checkpoint means, in f32.
                    want = meant[e][part].float().numpy()
                    np.testing.assert_array_equal(got, want, f"{name}: {part} of expert {e}")
            found = reference.bounded_layer(
                made.hidden.double().numpy(),
                made.ids.numpy(),
                made.topk.double().numpy(),
                experts,
                moe.config,
                (variant.act,) * 3,
                moe.shard_widths,
            )
            # Two computations in float64, by transformers and by the kit.
            np.testing.assert_allclose(found.value, expected, rtol=1e-9, atol=1e-9)
            got = moe(made.hidden.float(), made.ids, made.topk).double().numpy()
            bounds.check(got, expected, found.error * (1 + 1e-6) + 1e-9, f"{name} {variant.name}")
