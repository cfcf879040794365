"""Rotary embeddings of one token, computed by ktk, have the bits that models compute."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from tiny import FAMILIES
from torch import nn
from transformers.models.glm4_moe import modeling_glm4_moe as partly
from transformers.models.gpt_oss import modeling_gpt_oss as other
from transformers.models.qwen3_moe import modeling_qwen3_moe as whole

from ktk import _core
from ktk.transformers import rotary
from ktk.transformers.rotary import NAME, agrees, faster, speed_up_rotary


def stock_of(module: types.ModuleType) -> Any:
    found = getattr(module, NAME)
    return getattr(found, "__wrapped__", found)  # as it is before any model of ktk


def inputs(dtype: torch.dtype, turned: int, tokens: int = 1, batch: int = 1) -> Any:
    generator = torch.Generator().manual_seed(turned)
    shapes = ((batch, tokens, 8, 64), (batch, tokens, 2, 64))
    q, k = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    angles = torch.randn(batch, tokens, turned, generator=generator)
    return q, k, angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("module", "turned"), [(whole, 64), (partly, 64), (partly, 32)])
def test_the_same_bits(
    module: Any, turned: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = stock_of(module)
    fast = faster(stock)
    seen: list[Any] = []
    real = _core.rotate

    def spy(*x: Any) -> None:
        seen.append(x)
        real(*x)

    monkeypatch.setattr(_core, "rotate", spy)
    given = inputs(dtype, turned)
    for a, b in zip(stock(*given), fast(*given), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
    assert len(seen) == 1


def test_a_dtype_that_ktk_lacks_is_computed_by_torch() -> None:
    """Another model of the kind, in float64 for a reference."""
    given = inputs(torch.float64, 64)
    for a, b in zip(stock_of(whole)(*given), faster(stock_of(whole))(*given), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.float64


def test_special_values_are_torchs() -> None:
    q, k, cos, sin = inputs(torch.bfloat16, 64)
    q[0, :4, 0, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf, 3e38])
    for a, b in zip(
        stock_of(whole)(q, k, cos, sin), faster(stock_of(whole))(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("given", [{"tokens": 2}, {"batch": 2}])
def test_more_than_one_token_is_torchs(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = faster(stock_of(whole))
    monkeypatch.setattr(_core, "rotate", lambda *_: pytest.fail("not for ktk"))
    q, k, cos, sin = inputs(torch.float32, 64, **given)
    assert all(map(torch.equal, fast(q, k, cos, sin), stock_of(whole)(q, k, cos, sin)))
    one = inputs(torch.float32, 64)
    one[0].requires_grad = True
    fast(*one)[0].sum().backward()
    assert one[0].grad is not None


def test_rows_that_turn_in_part_are_left_to_functions_that_refuse_them() -> None:
    assert agrees(stock_of(partly), 2)
    assert not agrees(stock_of(whole), 2)
    with pytest.raises(RuntimeError, match="size of tensor"):
        faster(stock_of(whole))(*inputs(torch.float32, 32))


def test_functions_that_turn_otherwise_stay() -> None:
    assert not agrees(stock_of(other), 1)
    model = FAMILIES["gpt-oss"].make()
    before = getattr(other, NAME)
    speed_up_rotary(model)
    assert getattr(other, NAME) is before


def test_models_get_it_once() -> None:
    model = FAMILIES["qwen3-moe"].make()
    speed_up_rotary(model)
    first = getattr(whole, NAME)
    assert hasattr(first, rotary._OURS)
    speed_up_rotary(nn.Sequential(model))
    assert getattr(whole, NAME) is first


def test_errors_name_the_argument() -> None:
    q, k, cos, sin = (x.contiguous() for x in inputs(torch.float32, 64))
    cos, sin = cos.view(-1), sin.view(-1)
    with pytest.raises(ValueError, match="even number of values"):
        _core.rotate(q, k, cos[:3], sin[:3], q.clone(), k.clone())
    with pytest.raises(ValueError, match="sine must have shape"):
        _core.rotate(q, k, cos, sin[:32], q.clone(), k.clone())
    with pytest.raises(TypeError, match="q_out and k_out must have the dtypes of q and k"):
        _core.rotate(q, k, cos, sin, q.half(), k.clone())
