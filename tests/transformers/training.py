"""What tests of training share: a model with packed experts, its gradients, and their bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, load

#: The outputs of two layers of experts depend on two roundings of activations each, to 8 bits: an
#: error of half a unit at most. Products of int8 have codes of up to 127 steps for the largest of a
#: row, which is no more than 6 times the root of the mean square here, uniform within half a step.
FORWARD = {"BF16": 4 * 2.0**-9, "AMXINT8": 4 * 6 / 254 / 3**0.5}
#: A gradient passes some ten roundings to bf16 on its way through two layers of experts: products
#: that are kept, and three operands of either half. Each is half a unit of 8 bits at most.
ROUNDED = 16 * 2.0**-8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["qwen3-moe"].save(tmp_path_factory.mktemp("qwen3-moe"))


@pytest.fixture
def model(folder: Path) -> Any:
    return packed(folder)


@pytest.fixture(autouse=True)
def same_draws() -> None:
    torch.manual_seed(0)


def packed(folder: Path, **options: Any) -> Any:
    return load(folder, dtype=torch.float32, experts_implementation="ktk", **options)


def randomize(parameters: list[torch.nn.Parameter], seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for one in parameters:
        one.data.normal_(std=0.1, generator=generator)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(ids, labels=ids).loss
    return loss


def gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss_of(model, ids).backward()
    return {n: one.grad.clone() for n, one in model.named_parameters() if one.grad is not None}


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def off_by_token(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median of all tokens: a rounding may send one to another expert, on a tie."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
