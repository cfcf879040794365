"""An oracle no one here wrote: transformers' own models, saved by it and computed by it in float64.

The bound on the difference is propagated from the declared formats, element by element: codec error
of the weights (known exactly, from `unpack_expert`) and of the activations (half a step), and
gamma(k) for the f32 sums.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, MODELS, Model, width_of

import ktk
from ktk.checkpoint import describe
from ktk.checkpoint.safetensors import SafetensorsCheckpoint

# On the tile, beside it, and the ratio H = I that gpt-oss has (no shape tells axes apart there).
SIZES = [(64, 64), (128, 32), (72, 40), (33, 17), (130, 250)]
LAYER = 1
# Relative L2 error of a whole layer, in README.
PROMISED = {"BF16": 0.0025, "AMXINT8": 0.0280}
TOKENS = 19


@dataclass(frozen=True)
class Saved:
    """A saved model, and what its own expert block computes."""

    folder: Path
    model: Model
    experts: Any
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    expected: np.ndarray


def save(row: Model, hidden: int, inner: int, folder: Path) -> Saved:
    torch.manual_seed(hidden * 1000 + inner)
    model = row.make(hidden, inner)
    # The plain loop over experts: the grouped products of the default do not take float64.
    model.set_experts_implementation("eager")
    experts, *others = [
        module
        for name, module in model.named_modules()
        if re.search(rf"layers\.{LAYER}\.\w*\.?experts$", name)
    ]
    # Of an encoder, whose weights are the decoder's.
    assert all(one.down_proj is experts.down_proj for one in others)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            # Large enough that gates saturate and clamps bite; transformers starts at 0.02.
            std = 2.0 / hidden**0.5
            clamped = name.startswith("gate_up_proj") and hasattr(experts, "limit")
            parameter.normal_(std=3 * std if clamped else std)
    model.bfloat16().save_pretrained(folder, max_shard_size="60KB")
    experts.double()
    x = torch.randn(TOKENS, width_of(experts)).bfloat16()
    weights, ids = torch.rand(TOKENS, 6 + getattr(experts, "zero_expert_num", 0)).topk(3)
    with torch.no_grad():
        expected = experts(x.double(), ids, weights.double())
    return Saved(folder, row, experts, x, ids, weights, expected.numpy())


@pytest.fixture(scope="module", params=SIZES, ids=lambda size: f"{size[0]}x{size[1]}")
def size(request: pytest.FixtureRequest) -> tuple[int, int]:
    size: tuple[int, int] = request.param
    return size


@pytest.fixture(scope="module", params=MODELS)
def saved(
    request: pytest.FixtureRequest, size: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> Saved:
    return save(MODELS[request.param], *size, tmp_path_factory.mktemp(request.param))


def check_reading(saved: Saved) -> None:
    """Every expert must be read as it is in memory, bit by bit."""
    description = describe(saved.folder)
    assert (description.family, description.layers) == (saved.model.family, saved.model.layers)
    experts = saved.experts
    with SafetensorsCheckpoint(saved.folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        for e in range(checkpoint.config.num_experts):
            got = {part: tensor.double() for part, tensor in layer.expert(e).arrays().items()}
            both = experts.gate_up_proj[e] if experts.has_gate else experts.up_proj[e]
            wanted = {"down": experts.down_proj[e]}
            if experts.is_transposed:
                both, wanted["down"] = both.T, wanted["down"].T
            if experts.has_gate:
                wanted["gate"], wanted["up"] = halves(both, experts)
            else:
                wanted["up"] = both
            if experts.has_bias:
                wanted["down_bias"] = experts.down_proj_bias[e]
                wanted["gate_bias"], wanted["up_bias"] = halves(
                    experts.gate_up_proj_bias[e], experts
                )
            assert got.keys() == wanted.keys()
            for part, tensor in wanted.items():
                assert torch.equal(got[part], tensor), f"{part} of expert {e}"


def halves(both: torch.Tensor, experts: Any) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = both.chunk(2) if experts.is_concatenated else (both[::2], both[1::2])
    return gate, up


def test_the_checkpoint_is_read_as_transformers_wrote_it(saved: Saved) -> None:
    check_reading(saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_computes_the_block_of_its_model(name: str, tmp_path: Path) -> None:
    saved = save(FAMILIES[name], 72, 40, tmp_path)
    check_reading(saved)
    check_result(saved, ktk.MoE.from_checkpoint(saved.folder, LAYER))


@pytest.mark.parametrize("name", ["BF16", "AMXINT8"])
def test_every_variant_computes_the_block_of_the_model(saved: Saved, name: str) -> None:
    backend = ktk.load_backend(name)
    runnable = [variant for variant in backend.variants if variant.runnable]
    assert runnable
    for variant in runnable:
        check_result(
            saved, ktk.MoE.from_checkpoint(saved.folder, LAYER, backend, variant=variant.name)
        )


def check_result(saved: Saved, moe: Any) -> None:
    """The layer must be within the bound of what the model computes in float64."""
    [act] = [variant.act for variant in moe.backend.variants if variant.name == moe.variant]
    got = moe(saved.hidden.float(), saved.ids, saved.weights)
    error = np.abs(np.asarray(got, dtype=np.float64) - saved.expected)
    allowed = bound(saved, moe, act)
    worst = np.unravel_index(np.argmax(error / allowed), error.shape)
    name = f"{moe.backend.name} {moe.variant}"
    assert (error <= allowed).all(), (
        f"{name}: at token, column {worst} error {error[worst]:.3g}, bound {allowed[worst]:.3g}"
    )
    # Worst cases of int8 grow past use over three products; as a whole it promises this.
    relative = np.linalg.norm(error) / np.linalg.norm(saved.expected)
    assert relative <= PROMISED[moe.backend.name], f"{name}: {relative:.4f}"


def bound(saved: Saved, moe: Any, act: Any) -> np.ndarray:
    """Bound |moe - model| for every element of the output."""
    with SafetensorsCheckpoint(saved.folder) as checkpoint:
        layer = checkpoint.layer(LAYER)
        config = checkpoint.config
        exact = [
            {part: tensor.double().numpy() for part, tensor in layer.expert(e).arrays().items()}
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
            if e < len(exact):  # a zero expert has an f32 product, and that is all
                part = one_row(x[token], exact[e], stored[e], config, act)
                total[token] += abs(weight) * part
    # The weighted sum itself, in f32.
    bound: np.ndarray = total * (1 + 1e-5) + 1e-6 * np.abs(saved.expected) + 1e-12
    return bound


def one_row(x: np.ndarray, exact: Any, stored: Any, config: Any, act: Any) -> np.ndarray:
    """Bound the error of one expert's output for one token."""
    if "gate" not in exact:
        assert config.activation == "relu2"
        up, up_error = product(x, np.zeros_like(x), exact, stored, "up", act)
        h = np.maximum(up, 0) ** 2
        h_error = (2 * np.maximum(up, 0) + up_error) * up_error
        return product(h, h_error + 2**-22 * np.abs(h), exact, stored, "down", act)[1]
    gate, gate_error = product(x, np.zeros_like(x), exact, stored, "gate", act)
    up, up_error = product(x, np.zeros_like(x), exact, stored, "up", act)
    if config.activation_limit is not None:
        # A clamp never moves two values further apart.
        gate = np.minimum(gate, config.activation_limit)
        up = np.clip(up, -config.activation_limit, config.activation_limit)
    oai = config.activation == "swigluoai"
    alpha, one = (config.activation_alpha, 1.0) if oai else (1.0, 0.0)
    slope = alpha * gate
    if config.activation == "gelu_pytorch_tanh":
        # gelu_tanh(g) = g sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
        slope = 2 * np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    glu = gate / (1 + np.exp(-slope))
    # |d/dg| <= 1.1 for g sigmoid(alpha g) with any alpha, <= 1.13 for gelu_tanh. 32 ulp: exp and
    # division in f32.
    glu_error = 1.13 * gate_error + 32 * 2**-24 * np.abs(glu) + 2**-30
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
    largest_code = {"i8": 127, "i16": 32767}[act.element]
    group = act.group_k or len(largest)
    error = np.empty_like(largest)
    for begin in range(0, len(largest), group):
        # Half a step of absmax / 127 (32767), and a little for the division in f32.
        half = largest[begin : begin + group].max() * (0.5 / largest_code)
        error[begin : begin + group] = half * 1.001
    return error
