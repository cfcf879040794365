"""Zero experts, which return what goes in: ids behind those of the experts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import ktk
from ktk.checkpoint import describe, open_checkpoint
from ktk.cli.contents import inspect
from ktk.conversion import convert
from ktk.testing.reference import Expert, layer

E, Z, K, H, I, TOKENS = 5, 3, 4, 64, 96, 37  # noqa: E741 - the names of the table of families


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    made = {name: torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    return {name: one.bfloat16().float() for name, one in made.items()}


def made(**options: Any) -> ktk.MoE:
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
        "zero_expert_num": Z,
    }
    moe = ktk.load_backend("BF16").moe(**sizes | options)
    exact: dict[str, Any] = weights()
    if not moe.config.gated:
        exact["gate"] = None
    return moe.load(**exact)


def batch(low: int = -1, high: int = E + Z + 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(low, high, (TOKENS, K))
    return torch.randn(TOKENS, H), ids, torch.rand(TOKENS, K)


def without(ids: torch.Tensor) -> torch.Tensor:
    return torch.where(ids < E, ids, -1)


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_they_add_weights_times_x_to_a_layer_that_has_none(
    shards: int, gated: bool, on_input: bool
) -> None:
    """Weights and x are such that no sum of these is rounded; that to the rest is, once."""
    options: dict[str, Any] = {
        "shards": shards,
        "gated": gated,
        "apply_router_weight_on_input": on_input,
    }
    x, ids, _ = batch()
    x = x.bfloat16().float()
    factors = torch.randint(1, 5, ids.shape) / 4
    passed = (ids >= E) & (ids < E + Z)
    through = (factors * passed).sum(1, keepdim=True) * x
    rest = made(**options, zero_expert_num=0)(x, ids, factors)
    got = made(**options)(x, ids, factors)
    # A sum for each zero expert of a token, of what is no larger than all terms together.
    most = rest.abs() + through.abs()
    assert bool(((got - (rest + through)).abs() <= (K + 1) * 2.0**-24 * most).all())
    assert bool((got != rest)[passed.any(1)].any())


def test_the_definition_has_them() -> None:
    x, ids, factors = batch()
    moe, exact = made(), weights()
    wanted = layer(
        x, ids, factors, lambda e: Expert.of({n: one[e] for n, one in exact.items()}), moe.config
    )
    error = np.linalg.norm(moe(x, ids, factors).numpy() - wanted) / np.linalg.norm(wanted)
    assert error < 2**-8  # activations in bf16, twice
    plain = layer(
        x,
        without(ids),
        factors,
        lambda e: Expert.of({n: one[e] for n, one in exact.items()}),
        moe.config,
    )
    assert np.linalg.norm(wanted - plain) > np.linalg.norm(wanted) / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_token_with_nothing_else_gets_itself(dtype: torch.dtype) -> None:
    """x as the caller gave it, which nobody encodes; all ways of a call have the same bits."""
    x, ids, _ = batch(E, E + Z)
    x = x.bfloat16().to(dtype)  # few digits, so that no sum is rounded
    factors = torch.tensor([0.5, 0.25, 0.125, 0.125]).expand(TOKENS, K)
    moe = made()
    assert torch.equal(moe(x, ids, factors), x)
    assert torch.equal(moe.submit(x, ids, factors).wait(), x)
    assert torch.equal(moe(x, ids, factors, mask=torch.ones(E, dtype=torch.bool)), x)
    y, _ = moe.forward_train(x, ids, factors)
    assert torch.equal(y, x)
    assert torch.equal(moe(x, ids, factors, out=x.clone()), x)
    here = x.clone()
    assert torch.equal(moe(here, ids, 2 * factors, out=here), 2 * x)


def test_a_layer_without_weights_passes_through() -> None:
    x, ids, factors = batch(E, E + Z)
    moe = ktk.load_backend("BF16").moe(
        num_experts=E,
        num_experts_per_tok=K,
        hidden_size=H,
        intermediate_size=I,
        zero_expert_num=Z,
    )
    assert torch.equal(moe(x, ids, factors), made()(x, ids, factors))
    got, wanted = (one.backward(x, x, ids, factors) for one in (moe, made()))
    assert torch.equal(torch.as_tensor(got.hidden), torch.as_tensor(wanted.hidden))
    assert torch.equal(torch.as_tensor(got.topk_weights), torch.as_tensor(wanted.topk_weights))
    ids[3, 1] = 2
    with pytest.raises(RuntimeError, match="no expert is loaded"):
        moe(x, ids, factors)


def test_a_mask_and_experts_that_are_left_out_leave_them_alone() -> None:
    x, ids, factors = batch()
    moe = made()
    mask = torch.tensor([True, False, True, False, False])
    masked = moe(x, ids, factors, mask=mask)
    known = (ids >= 0) & (ids < E)
    gone = torch.where(known & mask[ids.clamp(0, E - 1)], -1, ids)
    assert torch.equal(moe(x, gone, factors), masked)
    for expert in (0, 2):
        moe.leave_out(expert)
    assert torch.equal(moe(x, ids, factors), masked)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, ids, factors = batch()
    moe = made()
    expected = moe(x, ids, factors)
    x[4, 7] = torch.nan
    ids[4] = torch.tensor([E, -1, E + Z, E + 1])
    got = moe(x, ids, factors)
    others = torch.arange(TOKENS) != 4
    assert torch.equal(got[others], expected[others])
    assert torch.isnan(got[4]).nonzero().flatten().tolist() == [7]
    ids[4] = -1
    assert not moe(x, ids, factors)[4].any()


@pytest.mark.parametrize("on_input", [False, True])
def test_gradients_are_those_of_autograd(on_input: bool) -> None:
    """In float64, with weights that bf16 has; the kit has the bounds."""
    exact = {name: one.double().requires_grad_() for name, one in weights().items()}
    x, ids, factors = batch(0, E + Z)
    hidden, routing = x.double().requires_grad_(), factors.double().requires_grad_()
    y = torch.zeros(TOKENS, H, dtype=torch.float64)
    for slot in range(K):
        at, weight = ids[:, slot].clamp(max=E - 1), routing[:, slot : slot + 1]
        rows = weight * hidden if on_input else hidden
        gate, up = ((exact[name][at] @ rows.unsqueeze(-1)).squeeze(-1) for name in ("gate", "up"))
        h = torch.nn.functional.silu(gate) * up
        out = (exact["down"][at] @ h.unsqueeze(-1)).squeeze(-1)
        out = torch.where(ids[:, slot : slot + 1] < E, out, rows)
        y = y + (out if on_input else weight * out)
    grad = torch.randn(TOKENS, H)
    y.backward(grad.double())
    moe = made(apply_router_weight_on_input=on_input)
    _, kept = moe.forward_train(x, ids, factors)
    for saved in (kept, None):
        got = moe.backward(grad, x, ids, factors, saved=saved, weight_grads=True)
        assert got.weights is not None
        pairs = [(got.hidden, hidden), (got.topk_weights, routing)]
        pairs += [(getattr(got.weights, name), one) for name, one in exact.items()]
        for mine, leaf in pairs:
            assert leaf.grad is not None
            difference = torch.as_tensor(np.asarray(mine)).double() - leaf.grad
            assert difference.norm() < 2**-6 * leaf.grad.norm()  # products in bf16, and slopes


def test_an_adapter_has_nothing_for_them() -> None:
    x, ids, factors = batch(E, E + Z)
    a, b = torch.randn(E, 4, H), torch.randn(E, I, 4)
    lora = ktk.Lora(up_a=a, up_b=b)
    moe = made()
    assert torch.equal(moe(x, ids, factors, lora=lora), moe(x, ids, factors))
    got = moe.backward(x, x, ids, factors, lora=lora)
    assert got.lora is not None
    assert not any(torch.as_tensor(one).any() for _, one in got.lora.factors())


def test_no_tokens() -> None:
    x, ids, factors = batch()
    assert made()(x[:0], ids[:0], factors[:0]).shape == (0, H)


def test_their_number_is_checked() -> None:
    with pytest.raises(ValueError, match="zero_expert_num must be an integer from 0 to"):
        made(zero_expert_num=-1)
    with pytest.raises(ValueError, match="num_experts_per_tok is 9, but there are only 8 experts"):
        made(num_experts_per_tok=9)
    assert made(num_experts_per_tok=8).config.num_ids == E + Z


def checkpoint(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a layer as LongCat-Flash has them, and return its weights."""
    exact = weights()
    stem = "model.layers.1.mlp."
    tensors = {
        f"{stem}experts.{e}.{part}_proj.weight": exact[part][e].bfloat16()
        for part in exact
        for e in range(E)
    }
    tensors[f"{stem}router.classifier.weight"] = torch.zeros(E + Z, H)
    tensors["model.layers.1.mlps.0.gate_proj.weight"] = torch.zeros(2 * I, H).bfloat16()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {
        "model_type": "longcat_flash",
        "architectures": ["LongcatFlashForCausalLM"],
        "hidden_size": H,
        "ffn_hidden_size": 2 * I,
        "expert_ffn_hidden_size": I,
        "n_routed_experts": E,
        "zero_expert_num": Z,
        "zero_expert_type": "identity",
        "moe_topk": K,
        "num_layers": 2,
        **changes,
    }
    config = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return exact


@pytest.mark.parametrize("kind", ["identity", None])
def test_longcat_flash_is_read_and_converted(tmp_path: Path, kind: str | None) -> None:
    """As Meituan publishes it, with its own names; transformers' configuration has no type."""
    source = tmp_path / "source"
    checkpoint(source, zero_expert_type=kind)
    convert(source, tmp_path / "packed", backend="BF16")
    x, ids, factors = batch()
    wanted = made()(x, ids, factors)
    for path in (source, tmp_path / "packed"):
        with open_checkpoint(path) as opened:
            config = opened.layer(1).config
            assert (config.zero_expert_num, config.intermediate_size) == (Z, I)
        assert torch.equal(ktk.MoE.from_checkpoint(path, 1)(x, ids, factors), wanted)


def test_they_are_told(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    said = str(describe(tmp_path / "source"))
    assert f"{E} experts of {H} x {I} and {Z} zero experts, {K} per token" in said
    [report] = inspect(tmp_path / "source")
    assert (report.num_experts, report.zero_expert_num) == (E, Z)


def test_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source", zero_expert_type="copy")
    with (
        pytest.raises(ktk.CheckpointError, match=r"zero_expert_type is 'copy', .* 'identity'"),
        open_checkpoint(tmp_path / "source"),
    ):
        pass


def test_a_wish_may_not_lose_them(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    wanted = dataclasses.replace(made().config, zero_expert_num=0)
    with pytest.raises(ValueError, match="the checkpoint has zero_expert_num 3, but 0 is asked"):
        ktk.MoE.from_checkpoint(tmp_path / "source", 1, config=wanted)
