"""An oracle no one here wrote: transformers' own models, saved by it and computed by it in float64.

The bound on the difference is propagated from the declared formats, element by element: codec error
of the weights (known exactly, from `unpack_expert`) and of the activations (half a step), and
gamma(k) for the f32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk.checkpoint import describe
from ktk.checkpoint.experts import Checkpoint

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def qwen3(hidden: int, inner: int) -> Any:
    config = transformers.Qwen3MoeConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=2 * inner,
        moe_intermediate_size=inner,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        head_dim=16,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def mixtral(hidden: int, inner: int) -> Any:
    config = transformers.MixtralConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=16,
    )
    return transformers.MixtralForCausalLM(config)


def gpt_oss(hidden: int, inner: int) -> Any:
    config = transformers.GptOssConfig(
        **COMMON,
        hidden_size=hidden,
        intermediate_size=inner,
        num_local_experts=5,
        num_experts_per_tok=2,
        head_dim=16,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    return transformers.GptOssForCausalLM(config)


# On the tile, beside it, and the ratio H = I that gpt-oss has (no shape tells axes apart there).
SIZES = [(64, 64), (128, 32), (72, 40), (33, 17), (130, 250)]
MODELS = {
    "qwen3-moe": (qwen3, "per-expert"),
    "mixtral": (mixtral, "mixtral"),
    "gpt-oss": (gpt_oss, "gpt-oss"),
}
LAYER = 1
# Relative L2 error of a whole layer, in README.
PROMISED = {"BF16": 0.0025, "AMXINT8": 0.0280}
TOKENS = 19


@dataclass(frozen=True)
class Saved:
    """A saved model, and what its own expert block computes."""

    folder: Path
    family: str
    experts: Any
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expected: np.ndarray


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    return request.param


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, size: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    make, family = MODELS[request.param]
    torch.manual_seed(hash(size) % 1000)
    model = make(*size)
    # The plain loop over experts: the grouped products of the default do not take float64.
    model.set_experts_implementation("eager")
    block = model.model.layers[LAYER].mlp
    with torch.no_grad():
        for parameter in block.parameters():
            # Large enough that gates saturate and clamps of 7 bite; transformers starts at 0.02.
            parameter.normal_(std=2.0 / size[0] ** 0.5)
        if request.param == "gpt-oss":
            block.experts.gate_up_proj.mul_(3)
    model = model.bfloat16()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="60KB")
    block = model.model.layers[LAYER].mlp.double()
    hidden = torch.randn(TOKENS, size[0]).bfloat16()
    router = block.gate if hasattr(block, "gate") else block.router
    with torch.no_grad():
        _, weights, ids = router(hidden.double())
        weights = weights.float()
        expected = block.experts(hidden.double(), ids, weights.double())
    return Saved(folder, family, block.experts, hidden, ids, weights, expected.numpy())


def test_the_checkpoint_is_read_as_transformers_wrote_it(saved: Saved) -> None:
    description = describe(saved.folder)
    assert (description.family, description.layers) == (saved.family, (0, 1))
    experts = saved.experts
    with Checkpoint(saved.folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        for e in range(checkpoint.config.num_experts):
            got = {part: tensor.double() for part, tensor in checkpoint.expert(layer, e).items()}
            both, down = experts.gate_up_proj[e], experts.down_proj[e]
            if saved.family == "gpt-oss":
                wanted = {"gate": both[:, ::2].T, "up": both[:, 1::2].T, "down": down.T}
                bias = experts.gate_up_proj_bias[e]
                wanted |= {"gate_bias": bias[::2], "up_bias": bias[1::2]}
                wanted |= {"down_bias": experts.down_proj_bias[e]}
            else:
                gate, up = both.chunk(2)
                wanted = {"gate": gate, "up": up, "down": down}
            assert got.keys() == wanted.keys()
            for part, tensor in wanted.items():
                assert torch.equal(got[part], tensor), f"{part} of expert {e}"


@pytest.mark.parametrize("name", ["BF16", "AMXINT8"])
def test_every_variant_computes_the_block_of_the_model(saved: Saved, name: str) -> None:
    backend = ktk.load_backend(name)
    runnable = [variant for variant in backend.variants if variant.runnable]
    assert runnable
    for variant in runnable:
        moe = ktk.MoE.from_checkpoint(saved.folder, LAYER, backend, variant=variant.name)
        got = moe(saved.hidden.float(), saved.ids, saved.weights)
        error = np.abs(np.asarray(got, dtype=np.float64) - saved.expected)
        allowed = bound(saved, moe, variant.act)
        worst = np.unravel_index(np.argmax(error / allowed), error.shape)
        assert (error <= allowed).all(), (
            f"{name} {variant.name}: at token, column {worst} error {error[worst]:.3g}, "
            f"bound {allowed[worst]:.3g}"
        )
        # Worst cases of int8 grow past use over three products; as a whole it promises this.
        relative = np.linalg.norm(error) / np.linalg.norm(saved.expected)
        assert relative <= PROMISED[name], f"{name} {variant.name}: {relative:.4f}"


def bound(saved: Saved, moe: Any, act: Any) -> np.ndarray:
    """Bound |moe - model| for every element of the output."""
    with Checkpoint(saved.folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        config = checkpoint.config
        exact = [
            {part: tensor.double().numpy() for part, tensor in checkpoint.expert(layer, e).items()}
            for e in range(config.num_experts)
        ]
    stored = [
        dict(zip(("gate", "up", "down"), moe.unpack_expert(e), strict=True))
        for e in range(config.num_experts)
    ]
    x = saved.hidden.double().numpy()
    total = np.zeros_like(saved.expected)
    for token in range(TOKENS):
        for e, weight in zip(saved.ids[token].tolist(), saved.weights[token].tolist(), strict=True):
            part = one_row(x[token], exact[e], stored[e], config, act)
            total[token] += abs(weight) * part
    # The weighted sum itself, in f32.
    return total * (1 + 1e-5) + 1e-6 * np.abs(saved.expected) + 1e-12


def one_row(x: np.ndarray, exact: Any, stored: Any, config: Any, act: Any) -> np.ndarray:
    """Bound the error of one expert's output for one token."""
    gate, gate_error = product(x, np.zeros_like(x), exact, stored, "gate", act)
    up, up_error = product(x, np.zeros_like(x), exact, stored, "up", act)
    oai = config.activation == "swigluoai"
    if oai:
        # A clamp never moves two values further apart.
        gate = np.minimum(gate, config.activation_limit)
        up = np.clip(up, -config.activation_limit, config.activation_limit)
    alpha, one = (config.activation_alpha, 1.0) if oai else (1.0, 0.0)
    glu = gate / (1 + np.exp(-alpha * gate))
    # |d/dg g sigmoid(alpha g)| <= 1.1 for every alpha. 32 ulp: exp and division in f32.
    glu_error = 1.1 * gate_error + 32 * 2**-24 * np.abs(glu) + 2**-30
    h = glu * (up + one)
    h_error = glu_error * (np.abs(up + one) + up_error) + np.abs(glu) * up_error
    _, error = product(h, h_error + 2**-22 * np.abs(h), exact, stored, "down", act)
    return error


def product(
    x: np.ndarray, x_error: np.ndarray, exact: Any, stored: Any, part: str, act: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return weight @ x + bias in float64, and a bound on what ktk's differs from it."""
    weight, bias = exact[part], exact.get(part + "_bias", 0.0)
    shift = stored[part].astype(np.float64) - weight
    largest = np.abs(x) + x_error
    x_error = x_error + act_error(largest, act)
    k = len(x)
    # Products and sums of f32, scales of groups included, in any order.
    gamma = (k + 8) * 2**-24 / (1 - (k + 8) * 2**-24)
    reach = np.abs(stored[part].astype(np.float64))
    error = np.abs(shift @ x) + reach @ x_error
    error = error + gamma * (reach @ largest + np.abs(bias))
    return weight @ x + bias, error


def act_error(largest: np.ndarray, act: Any) -> np.ndarray:
    """Bound the codec's error for a row whose elements are at most this large."""
    if act.element == "f32":
        return np.zeros_like(largest)
    if act.element == "bf16":
        return largest * 2**-9 + 2**-134
    assert act.element == "i8", act
    group = act.group_k or len(largest)
    error = np.empty_like(largest)
    for begin in range(0, len(largest), group):
        # Half a step of absmax / 127, and a little for the division in f32.
        error[begin : begin + group] = largest[begin : begin + group].max() * (0.5 / 127) * 1.001
    return error
