"""Hosts change torch's default dtype and device, for models they make: ktk says what it wants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import ktk
from ktk.hosts import OpLayer
from ktk.ktmoe.masks import generate_gpu_experts_masks, initial_mask
from ktk.quantize import quantize
from ktk.transformers.routers import FastRouter, speed_up_routers

PACKAGE = Path(ktk.__file__).parent
FLOATS = {"empty", "zeros", "ones", "full", "rand", "randn", "linspace", "eye"}
OTHERS = {"tensor", "arange", "randperm", "randint", "as_tensor"}


def unsaid() -> Iterator[str]:
    """Yield calls of torch's factories that leave a device, or a dtype of floats, to defaults."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            module, name = node.func.value, node.func.attr
            if not isinstance(module, ast.Name) or module.id != "torch":
                continue
            given = {keyword.arg for keyword in node.keywords}
            wanted = {"device", "dtype"} if name in FLOATS else {"device"}
            if name in FLOATS | OTHERS and not (wanted <= given or None in given):
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{name}"


def test_factories_say_what_they_make() -> None:
    assert list(unsaid()) == []


@pytest.fixture(params=[torch.bfloat16, torch.float64])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def test_factors_are_f32(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = torch.randn(64, 64, dtype=torch.float32)
    codes = quantize(weight, "e2m1-e4m3-g16", factor=0.0037)
    assert codes.factor is not None
    assert codes.factor.dtype == torch.float32
    linear = ktk.Linear("NVFP4", 64, 64).load(codes)
    linear.save(tmp_path / "layer.ktk")
    again = ktk.Linear.from_file(tmp_path / "layer.ktk")
    assert (again.unpack() == linear.unpack()).all()


class TopKRouter(nn.Module):
    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 64, dtype=torch.float32).bfloat16())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = nn.functional.linear(x, self.weight)
        values, ids = logits.float().softmax(-1).topk(self.top_k)
        return logits, values, ids


def test_routers_are_asked_in_f32(dtype: torch.dtype) -> None:
    model = nn.Sequential(TopKRouter())
    speed_up_routers(model)
    assert isinstance(model[0], FastRouter)


def test_another_default_device_changes_nothing() -> None:
    rng = torch.Generator("cpu").manual_seed(0)
    moe = ktk.load_backend("BF16").moe(
        num_experts=4, num_experts_per_tok=2, hidden_size=64, intermediate_size=32
    )
    shapes = (4, 32, 64), (4, 32, 64), (4, 64, 32)
    moe.load(*(torch.randn(shape, generator=rng) for shape in shapes))
    x, weights = torch.randn(3, 64, generator=rng), torch.rand(3, 2, generator=rng)
    ids = torch.tensor([[0, 1], [2, 3], [1, 2]])
    linear = ktk.Linear("BF16", 64, 64).load(torch.randn(64, 64, generator=rng))
    codes = quantize(torch.randn(64, 64, generator=rng), "e2m1-ue8m0-g32")
    expected = moe(x, ids, weights), linear.rows(ids), codes.dequantize()
    with torch.device("meta"):
        layer = OpLayer(moe)
        found = layer(x, ids, weights), linear.rows(ids), codes.dequantize()
        masks = [initial_mask(4, None, 1)] + [
            generate_gpu_experts_masks([[1.0, 2.0, 3.0]] * 2, 3, strategy=one)
            for one in ("uniform", "frequency", "random", "front-loading")
        ]
        quantize(codes.dequantize(), "u4-bf16-g32")
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)
    assert {mask.device.type for mask in masks} == {"cpu"}
