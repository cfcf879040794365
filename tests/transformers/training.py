"""What tests of training share: a model with packed experts, its gradients, and their bounds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import FAMILIES, load

import ktk.transformers
from ktk.errors import BackendUnsupported
from ktk.testing import bounds, formats
from ktk.transformers.packed import Packed, packed_modules

#: A gradient passes some ten roundings to bf16 on its way through two layers of experts: products
#: that are kept, and three operands of either half. Each is half a unit of 8 bits at most.
ROUNDED = 16 * 2.0**-8

#: Of the runs of two ranks: steps, what gradients are multiplied with, and what a rank reads.
STEPS, RATE = 2, 0.1


def seed_of(step: int, rank: int) -> int:
    return 2 * step + rank


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


def packed_by(backend: str, folder: Path) -> Any:
    """Return a model packed for a backend; where that cannot run, skip the test."""
    with skipping_what_cannot_run_here():
        return packed(folder, quantization_config=ktk.transformers.KtkConfig(backend))


@contextlib.contextmanager
def skipping_what_cannot_run_here() -> Iterator[None]:
    """Skip a test whose backend lacks an instruction set or a library; other errors are faults."""
    try:
        yield
    except BackendUnsupported as error:
        pytest.skip(str(error))


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


def act_error(one: Packed) -> float:
    """Return the error of a layer's activations as they are stored, relative, root mean square.

    A rounding to a float of b bits is at most half a unit of them, and half of that on average of
    what lies between two powers of two. Integers are uniform within half a step of the largest of
    their group, which is no more than 6 times the root of the mean square here, and never more than
    the root of the group's length. Of f32 only the roundings of sums are left.
    """
    [variant] = [v for v in one.moe.backend.variants if v.name == one.moe.variant]
    config, worst = one.moe.config, 0.0
    depths = (config.hidden_size, config.hidden_size, config.intermediate_size)
    stored = (one.moe.format, one.moe.up_format, one.moe.down_format)
    for fmt, k in zip(stored, depths, strict=True):
        if fmt is None:  # no gate
            continue
        act = variant.act_of(fmt, variant.n_step, formats.fill_bytes(fmt, k))
        element = formats.ELEMENTS[act.element]
        if isinstance(element, formats.Integer):
            largest = min(6, (min(act.group_k, k) or k) ** 0.5)
            error = largest / element.levels / 12**0.5
        else:
            error = element.unit / 2
        worst = max(worst, error, bounds.gamma(k + bounds.EXTRA_ROUNDINGS))
    return worst


def forward_error(model: Any) -> float:
    """Bound the relative error of logits: each layer of experts stores activations twice."""
    return 2 * sum(map(act_error, packed_modules(model).values()))


def off_by(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def off_by_token(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the median of all tokens: a rounding may send one to another expert, on a tie."""
    return float(((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())
