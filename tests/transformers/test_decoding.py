"""What makes a step of one token fast changes no number, or only the order of a sum."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from tiny import FAMILIES
from torch import nn

import ktk.transformers
from ktk import _core
from ktk.transformers import norms
from ktk.transformers.decoding import TOGETHER
from ktk.transformers.dense import KtkLinear, packed_linears
from ktk.transformers.norms import FastNorm, norm_of


def alone(model: Any) -> Any:
    """Return a model whose layers are computed one by one."""
    for layer in packed_linears(model).values():
        layer._together = None
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("model"))
    return ktk.transformers.load(folder, linears="AMXINT8", head="BF16")


def members(model: Any) -> list[list[Any]]:
    """Return the groups of layers of a model."""
    found: dict[int, list[Any]] = {}
    for layer in packed_linears(model).values():
        if layer._together is not None:
            found.setdefault(id(layer._together[0]), []).append(layer)
    return list(found.values())


def new_group(layers: list[ktk.Linear]) -> _core.LinearGroup:
    return _core.LinearGroup([layer._core for layer in layers])


def test_q_k_and_v_are_computed_together(model: Any) -> None:
    names = [[layer.name.rpartition(".")[2] for layer in group] for group in members(model)]
    assert names == [list(TOGETHER[0])] * model.config.num_hidden_layers


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_as_alone(model: Any, rows: int, dtype: torch.dtype) -> None:
    layers = [layer.linear for layer in members(model)[0]]
    generator = torch.Generator().manual_seed(rows)
    first, second = torch.randn(2, rows, tiny.H, generator=generator).to(dtype)
    # In the usual order, another one, the same one twice, and with inputs in turn. Each time by a
    # group of its own: one gives up after some results that nobody asked for.
    for calls in (
        [(first, i) for i in (0, 1, 2)],
        [(first, i) for i in (0, 1, 2, 2, 1, 1, 0)],
        [(x, i) for i in (0, 1) for x in (first, second)],
        [*((first[:1], i) for i in (0, 1)), *((first, i) for i in (0, 1, 2))],
    ):
        together = new_group(layers)
        for x, index in calls:
            out = torch.empty(*x.shape[:-1], layers[index].out_features, dtype=dtype)
            together.forward(index, x, out)
            assert torch.equal(out, layers[index](x))
        assert not together.gave_up


def test_an_input_that_changed_is_another_one(model: Any) -> None:
    group = members(model)[0]
    together = new_group([layer.linear for layer in group])
    x = torch.randn(1, tiny.H).bfloat16()
    outs = [torch.empty(1, layer.linear.out_features, dtype=x.dtype) for layer in group]
    together.forward(0, x, outs[0])
    x += 1
    together.forward(1, x, outs[1])
    assert torch.equal(outs[1], group[1].linear(x))
    together.forward(2, x.float(), out := torch.empty(1, outs[2].shape[1]))
    assert torch.equal(out, group[2].linear(x.float()))
    assert not together.gave_up


def test_results_of_a_weight_that_is_gone_are_not_given() -> None:
    one, other = (ktk.Linear("BF16", 64, 32).load(np.ones((32, 64), np.float32)) for _ in range(2))
    group = _core.LinearGroup([one._core, other._core])
    x, out = np.ones((1, 64), np.float32), np.empty((1, 32), np.float32)
    group.forward(0, x, out)
    other.load(np.full((32, 64), 2, np.float32))
    group.forward(1, x, out)
    assert (out == 128).all()


def test_layers_that_are_not_called_together_are_not_computed_in_vain(model: Any) -> None:
    """Results that nobody asks for cost time: after some, no more are kept."""
    group = [layer.linear for layer in members(model)[0]]
    together = new_group(group)
    outs = [torch.empty(1, linear.out_features) for linear in group]
    for _ in range(20):
        x = torch.randn(1, tiny.H)
        together.forward(0, x, outs[0])
        assert torch.equal(outs[0], group[0](x))
    assert together.gave_up


def test_groups_say_what_is_wrong_with_them() -> None:
    one, other, wide = (
        ktk.Linear("BF16", k, 32).load(np.ones((32, k), np.float32)) for k in (64, 64, 128)
    )
    with pytest.raises(ValueError, match="two layers at least"):
        _core.LinearGroup([one._core])
    with pytest.raises(ValueError, match="inputs of one width and one pool"):
        _core.LinearGroup([one._core, wide._core])
    group = _core.LinearGroup([one._core, other._core])
    x, out = np.ones((1, 64), np.float32), np.empty((1, 32), np.float32)
    with pytest.raises(IndexError, match="no such layer"):
        group.forward(2, x, out)
    with pytest.raises(ValueError, match=r"x must have shape \[..., 64\]"):
        group.forward(0, out, out)
    group.forward(1, x, out)
    assert np.array_equal(out, np.full((1, 32), 64, np.float32))


def test_a_model_gives_the_same_logits_with_and_without(model: Any) -> None:
    ids = tiny.tokens(rows=1, length=6)
    states = []
    for one in (model, alone(copy.deepcopy(model))):
        with torch.no_grad():
            past = one(ids, use_cache=True).past_key_values
            states.append([one(ids[:, :1], past_key_values=past).logits for _ in range(3)])
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


def norm_classes() -> dict[str, Any]:
    found = {}
    for family in FAMILIES.values():
        for module in family.make().modules():
            if "RMSNorm" in type(module).__name__ and norm_of(module) is not None:
                found[type(module).__name__] = module
    return found


def test_norms_of_all_families_are_known() -> None:
    known = norm_classes()
    assert {"Qwen3MoeRMSNorm", "Qwen3NextRMSNorm", "GptOssRMSNorm", "DeepseekV3RMSNorm"} <= set(
        known
    )
    offsets = {name: norm_of(one)[1] for name, one in known.items()}  # type: ignore[index]
    assert offsets["Qwen3NextRMSNorm"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_norms_are_what_they_were_but_for_the_order_of_a_sum(dtype: torch.dtype) -> None:
    for stock in norm_classes().values():
        stock = copy.deepcopy(stock).to(dtype)
        n = stock.weight.numel()
        with torch.no_grad():
            stock.weight.copy_(torch.randn(n))
        fast = copy.deepcopy(stock)
        norms.speed_up_norms(fast)
        assert isinstance(fast, FastNorm)
        assert isinstance(fast, type(stock))
        x = torch.randn(3, 5, n, generator=torch.Generator().manual_seed(1)).to(dtype)
        with torch.no_grad():
            for given in (x, x.transpose(0, 1), x[:, :1], x[:0]):
                wanted, found = stock(given), fast(given)
                assert found.shape == wanted.shape
                assert found.dtype == wanted.dtype
                # The mean of n squares has n roundings at most either way, of which the root has
                # half; then come four roundings of f32 and two of the dtype, of each.
                unit = torch.finfo(dtype).eps / 2
                bound = ((n + 4) * 2.0**-24 + 2 * unit) * 2
                error = (found.double() - wanted.double()).abs()
                assert (error <= bound * wanted.double().abs() + torch.finfo(dtype).tiny).all()


def test_norms_leave_gradients_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = nn.Sequential(transformers.models.llama.modeling_llama.LlamaRMSNorm(64))
    norms.speed_up_norms(fast)
    monkeypatch.setattr(_core, "rms_norm", lambda *_: pytest.fail("not for ktk"))
    x = torch.randn(2, 64, requires_grad=True)
    fast(x).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_of_a_prompt_have_the_bits_of_its_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast: Any = nn.Sequential(transformers.models.llama.modeling_llama.LlamaRMSNorm(64).to(dtype))
    norms.speed_up_norms(fast)
    pools = [ktk.WorkerPool(threads=3)]
    monkeypatch.setattr(norms, "default_pool", pools.pop)
    x = torch.randn(norms._FEW // 64 + 1, 2, 64).to(dtype)
    with torch.no_grad():
        together = fast(x.transpose(0, 1))
        assert not pools
        alone = torch.stack([fast(row) for row in x], 1)
    assert torch.equal(together, alone)


def test_what_is_no_rms_norm_stays() -> None:
    class OtherRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))
            self.eps = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    class GatedRMSNorm(OtherRMSNorm):
        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * gate

    model = nn.Sequential(OtherRMSNorm(), GatedRMSNorm(), nn.LayerNorm(64), nn.Linear(64, 64))
    norms.speed_up_norms(model)
    assert not any(isinstance(one, FastNorm) for one in model)


def test_only_models_with_packed_dense_layers_change(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3-moe"].save(tmp_path)
    model = ktk.transformers.load(folder)
    assert not any(isinstance(one, (FastNorm, KtkLinear)) for one in model.modules())
