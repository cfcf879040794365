"""Routers, computed by ktk, choose what torch's do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import FAMILIES
from torch import nn

from ktk import _core
from ktk.transformers import routers
from ktk.transformers.routers import FastRouter, router_of


def known_routers() -> dict[str, Any]:
    found = {}
    for family in FAMILIES.values():
        for module in family.make().modules():
            if router_of(module) is not None:
                found[type(module).__name__] = module
    return found


def sped_up(stock: Any) -> Any:
    fast = copy.deepcopy(stock)
    routers.speed_up_routers(fast)
    assert isinstance(fast, FastRouter)
    assert isinstance(fast, type(stock))
    return fast


def test_softmax_routers_are_known_and_no_others() -> None:
    known = known_routers()
    assert {"Qwen3MoeTopKRouter", "MixtralTopKRouter", "GptOssTopKRouter"} <= set(known)
    assert not {"DeepseekV3TopkRouter", "MiniMaxM2TopKRouter"} & set(known)
    sums = {name: router_of(one)[0] for name, one in known.items()}  # type: ignore[index]
    assert sums["MixtralTopKRouter"]
    assert not sums["OlmoeTopKRouter"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 4, 37])
def test_logits_differ_by_the_order_of_a_sum_and_scores_follow(
    dtype: torch.dtype, tokens: int
) -> None:
    for stock in known_routers().values():
        stock = copy.deepcopy(stock).to(dtype)
        experts, k = stock.weight.shape
        generator = torch.Generator().manual_seed(tokens)
        with torch.no_grad():
            for _, one in stock.named_parameters():
                one.copy_(torch.randn(one.shape, generator=generator))
        fast = sped_up(stock)
        x = (torch.randn(tokens, k, generator=generator) / k**0.5).to(dtype)
        with torch.no_grad():
            wanted, found = stock(x), fast(x)
        for a, b in zip(wanted, found, strict=True):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
        # k products and sums in f32 either way, of what is added up without signs; then one
        # rounding to the dtype, of each.
        weight, rows = stock.weight.detach().double(), x.double()
        sizes = rows.abs() @ weight.abs().T
        bias = getattr(stock, "bias", None)
        if bias is not None:
            sizes += bias.detach().double().abs()
        logits = found[0].double()
        bound = 2 * (k + 1) * 2.0**-24 * sizes + torch.finfo(dtype).eps * logits.abs()
        assert ((logits - wanted[0].double()).abs() <= bound).all()
        # Of its own logits, those chosen are the largest, in order.
        top = logits.topk(stock.top_k, dim=-1)
        assert torch.equal(logits.gather(-1, found[2]), top.values)
        probabilities = logits.softmax(-1).gather(-1, found[2])
        if router_of(stock)[0]:  # type: ignore[index]
            probabilities = probabilities / probabilities.sum(-1, keepdim=True)
        # exp, sums over the experts, a quotient: roundings of f32, then one of the dtype.
        unit = (experts + 8) * 2.0**-23 + torch.finfo(found[1].dtype).eps / 2
        tiny = torch.finfo(found[1].dtype).smallest_normal
        assert ((found[1].double() - probabilities).abs() <= unit * probabilities + tiny).all()


def route(x: torch.Tensor, weight: torch.Tensor, top_k: int, chosen_only: bool = True) -> Any:
    logits = torch.empty(len(x), len(weight))
    scores = torch.empty(len(x), top_k)
    ids: Any = torch.empty(len(x), top_k, dtype=torch.int64)
    _core.route(x, weight, None, logits, scores, ids, chosen_only)
    return logits, scores, ids


def test_equal_logits_go_to_the_lower_number() -> None:
    _, scores, ids = route(torch.ones(2, 32), torch.ones(16, 32), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    assert torch.equal(scores, torch.full((2, 3), 1 / 3))


@pytest.mark.parametrize("chosen_only", [True, False])
def test_nan_is_chosen_first_and_spoils_its_token_only(chosen_only: bool) -> None:
    x = torch.randn(2, 32)
    x[0, 3] = torch.nan
    weight = torch.randn(16, 32)
    _, scores, ids = route(x, weight, 4, chosen_only)
    assert scores[0].isnan().all()
    assert scores[1].isfinite().all()
    assert ((ids >= 0) & (ids < 16)).all()
    weight[9, 0] = torch.nan
    _, scores, ids = route(x[1:], weight, 1, chosen_only)
    assert ids.tolist() == [[9]]
    assert scores.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_tokens_are_torchs_where_it_multiplies_fast(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = copy.deepcopy(known_routers()["Qwen3MoeTopKRouter"]).to(dtype)
    fast = sped_up(stock)
    x = torch.randn(routers._MOST + 1, stock.weight.shape[1]).to(dtype)
    with torch.no_grad():
        monkeypatch.setattr(routers, "_has_fast_products", lambda _: True)
        assert all(map(torch.equal, stock(x), fast(x)))
        monkeypatch.setattr(routers, "_route_many", lambda *_: "in f32")
        monkeypatch.setattr(routers, "_has_fast_products", lambda _: False)
        assert fast(x) == "in f32"


def test_many_tokens_and_gradients_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = sped_up(known_routers()["Qwen3MoeTopKRouter"])
    monkeypatch.setattr(_core, "route", lambda *_: pytest.fail("not for ktk"))
    k = fast.weight.shape[1]
    fast(torch.randn(1, k, requires_grad=True))[1].sum().backward()
    with torch.no_grad():
        assert len(fast(torch.randn(routers._MOST + 1, k))[0]) == routers._MOST + 1


def test_what_is_no_softmax_router_stays() -> None:
    class SigmoidRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.top_k = 2
            self.weight = nn.Parameter(torch.randn(8, 32))

        def forward(self, x: torch.Tensor) -> Any:
            logits = nn.functional.linear(x, self.weight)
            scores, ids = logits.sigmoid().topk(self.top_k)
            return logits, scores, ids

    assert router_of(SigmoidRouter()) is None
    assert router_of(nn.Linear(32, 8)) is None


def test_errors_name_the_argument() -> None:
    x, weight = torch.ones(1, 32), torch.ones(16, 32)
    logits, scores = torch.empty(1, 16), torch.empty(1, 17)
    wide: Any = torch.empty(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="ids must have 1 rows of 1 to 16 numbers"):
        _core.route(x, weight, None, logits, scores, wide, True)
    ids: Any = torch.empty(1, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="scores"):
        _core.route(x, weight, None, logits, scores, ids, True)
    with pytest.raises(ValueError, match="bias"):
        _core.route(x, weight, torch.ones(3), logits, scores[:, :2], ids, True)
    with pytest.raises(TypeError, match="bias must have the dtype of weight"):
        _core.route(x, weight, torch.ones(16).half(), logits, scores[:, :2], ids, True)
