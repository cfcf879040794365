"""Experts whose input is multiplied by the routing weight, instead of their output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk.checkpoint import open_checkpoint
from ktk.conversion import convert
from ktk.testing.reference import Expert, layer

E, K, H, I, TOKENS = 5, 2, 64, 96, 37  # noqa: E741 - the names of the table of families


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    made = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    made |= {f"{name}_bias": torch.randn(shape[:2]) for name, shape in shapes.items()}
    return {name: one.bfloat16().float() for name, one in made.items()}


def made(on_input: bool = True, **options: Any) -> ktk.MoE:
    backend = ktk.load_backend("BF16")
    moe = backend.moe(
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        intermediate_size=I,
        apply_router_weight_on_input=on_input,
        **options,
    )
    arrays: dict[str, Any] = weights()
    return moe.load(**arrays)


def batch(k: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(TOKENS, H), torch.randint(0, E, (TOKENS, k)), torch.rand(TOKENS, k)


@pytest.mark.parametrize("shards", [1, 2])
def test_a_power_of_two_is_as_good_as_in_the_hidden_states(shards: int) -> None:
    """bf16 of twice a number is twice its bf16: bit by bit the layer that is given w x."""
    x, ids, _ = batch(1)
    factors = 2.0 ** torch.randint(-3, 3, (TOKENS, 1))
    moe, plain = made(shards=shards), made(False, shards=shards)
    wanted = plain(x * factors, ids, torch.ones(TOKENS, 1))
    assert torch.equal(moe(x, ids, factors), wanted)
    assert torch.equal(moe.submit(x, ids, factors).wait(), wanted)


def test_outputs_are_added_as_they_are() -> None:
    x, ids, factors = batch()
    exact = weights()
    moe = made()
    wanted = layer(
        x, ids, factors, lambda e: Expert.of({n: one[e] for n, one in exact.items()}), moe.config
    )
    other = layer(
        x,
        ids,
        factors,
        lambda e: Expert.of({n: one[e] for n, one in exact.items()}),
        made(False).config,
    )
    error = np.linalg.norm(moe(x, ids, factors).numpy() - wanted) / np.linalg.norm(wanted)
    assert error < 2**-8  # activations in bf16, twice
    assert np.linalg.norm(other - wanted) > np.linalg.norm(wanted) / 4


def test_gradients_are_those_of_autograd() -> None:
    """In float64, with weights that bf16 has; the kit has the bounds."""
    exact = {name: one.double().requires_grad_() for name, one in weights().items()}
    x, ids, factors = batch()
    hidden, routing = x.double().requires_grad_(), factors.double().requires_grad_()
    y = torch.zeros(TOKENS, H, dtype=torch.float64)
    for slot in range(K):
        rows = (routing[:, slot : slot + 1] * hidden).unsqueeze(-1)

        def of(name: str, rows: torch.Tensor, slot: int = slot) -> torch.Tensor:
            at = ids[:, slot]
            return (exact[name][at] @ rows).squeeze(-1) + exact[f"{name}_bias"][at]

        h = torch.nn.functional.silu(of("gate", rows)) * of("up", rows)
        y = y + of("down", h.unsqueeze(-1))
    grad = torch.randn(TOKENS, H)
    y.backward(grad.double())
    moe = made()
    _, kept = moe.forward_train(x, ids, factors)
    got = moe.backward(grad, x, ids, factors, saved=kept, weight_grads=True)
    assert got.weights is not None
    pairs = [(got.hidden, hidden), (got.topk_weights, routing)]
    pairs += [(getattr(got.weights, name), one) for name, one in exact.items()]
    for mine, leaf in pairs:
        assert leaf.grad is not None
        difference = torch.as_tensor(np.asarray(mine)).double() - leaf.grad
        assert difference.norm() < 2**-6 * leaf.grad.norm()  # products kept in bf16, and slopes


def test_no_tokens_and_no_experts() -> None:
    x, ids, factors = batch()
    assert made()(x[:0], ids[:0], factors[:0]).shape == (0, H)
    assert not made()(x, torch.full_like(ids, -1), factors).any()


def test_the_option_is_a_bool() -> None:
    with pytest.raises(ValueError, match="apply_router_weight_on_input must be a bool, got 1"):
        made(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("whole", [True, False])
def test_llama_4_is_read_and_converted(tmp_path: Path, whole: bool) -> None:
    """As Meta publishes it: fused and transposed, alone or in a model of several modalities."""
    exact = weights()
    prefix = "language_model.model." if whole else "model."
    stem = f"{prefix}layers.1.feed_forward."
    joined = torch.cat([exact["gate"], exact["up"]], 1).transpose(1, 2)
    tensors = {
        f"{stem}experts.gate_up_proj": joined.bfloat16().contiguous(),
        f"{stem}experts.down_proj": exact["down"].transpose(1, 2).bfloat16().contiguous(),
        f"{stem}router.weight": torch.zeros(E, H).bfloat16(),
        f"{stem}shared_expert.gate_proj.weight": torch.zeros(I, H).bfloat16(),
    }
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    text = {
        "model_type": "llama4_text",
        "hidden_size": H,
        "intermediate_size": I,
        "intermediate_size_mlp": 2 * I,
        "num_local_experts": E,
        "num_experts_per_tok": 1,
        "hidden_act": "silu",
    }
    config = {"model_type": "llama4", "text_config": text} if whole else text
    (source / "config.json").write_text(json.dumps(config))
    convert(source, tmp_path / "packed", backend="BF16")
    x, ids, factors = batch(1)
    bias: dict[str, Any] = {name: one for name, one in exact.items() if not name.endswith("_bias")}
    plain = ktk.load_backend("BF16").moe(
        num_experts=E,
        num_experts_per_tok=1,
        hidden_size=H,
        intermediate_size=I,
        apply_router_weight_on_input=True,
    )
    wanted = plain.load(**bias)(x, ids, factors)
    for path in (source, tmp_path / "packed"):
        with open_checkpoint(path) as checkpoint:
            assert checkpoint.layer(1).config.apply_router_weight_on_input
        assert torch.equal(ktk.MoE.from_checkpoint(path, 1)(x, ids, factors), wanted)
