"""No gradient vanishes: where torch would record one, ktk refuses; elsewhere it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ktk

E, K, H, I, TOKENS = 2, 2, 64, 32, 3  # noqa: E741
REFUSED = r"{} requires grad, but ktk computes inference only.*torch\.no_grad\(\)"


def weights(**keywords: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    return {
        name: torch.randn(*shape, generator=generator, **keywords) for name, shape in shapes.items()
    }


def make() -> ktk.MoE:
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": K,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return ktk.load_backend("BF16").moe(**sizes)


@pytest.fixture(scope="module")
def moe() -> ktk.MoE:
    return make().load(**weights())


def inputs() -> dict[str, Any]:
    return {
        "hidden": torch.randn(TOKENS, H, generator=torch.Generator().manual_seed(1)),
        "topk_ids": torch.tensor([[0, 1]] * TOKENS),
        "topk_weights": torch.full((TOKENS, K), 0.5),
    }


def call(moe: ktk.MoE, **given: Any) -> Any:
    return moe(**given)


def submit(moe: ktk.MoE, **given: Any) -> Any:
    return moe.submit(**given).wait()


@pytest.mark.parametrize("run", [call, submit])
@pytest.mark.parametrize("name", ["hidden", "topk_weights"])
def test_a_call_refuses_what_would_lose_its_gradient(
    moe: ktk.MoE, run: Callable[..., Any], name: str
) -> None:
    given = inputs()
    expected = moe(**given)
    learning = given | {name: given[name].clone().requires_grad_()}
    with pytest.raises(RuntimeError, match=REFUSED.format(name)):
        run(moe, **learning)
    # What an operation made of it, too.
    with pytest.raises(RuntimeError, match=REFUSED.format(name)):
        run(moe, **learning | {name: learning[name] * 1})
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            result = run(moe, **learning)
        assert torch.equal(result, expected)
        assert not result.requires_grad
    assert torch.equal(run(moe, **learning | {name: learning[name].detach()}), expected)


@pytest.mark.parametrize("run", [call, submit])
def test_an_output_that_requires_grad_is_refused(moe: ktk.MoE, run: Callable[..., Any]) -> None:
    out = torch.zeros(TOKENS, H, requires_grad=True)
    with pytest.raises(RuntimeError, match=REFUSED.format("out")):
        run(moe, **inputs(), out=out)


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_a_load_refuses_parameters_unless_gradients_are_off(name: str) -> None:
    arrays = weights()
    learning = arrays | {name: torch.nn.Parameter(arrays[name])}
    with pytest.raises(RuntimeError, match=REFUSED.format(name)):
        make().load(**learning)
    one = {part: array[0] for part, array in arrays.items()}
    one[name] = torch.nn.Parameter(one[name])
    with pytest.raises(RuntimeError, match=REFUSED.format(name)):
        make().load_expert(0, **one)
    with torch.no_grad():
        loaded = make().load(**learning)
    assert torch.equal(loaded(**inputs()), make().load(**arrays)(**inputs()))


def test_the_wrapper_refuses_them_as_well() -> None:
    arrays = weights()
    wrapper = ktk.KTMoEWrapper(0, E, K, H, I, method="BF16")
    learning = [torch.nn.Parameter(array) for array in arrays.values()]
    with pytest.raises(RuntimeError, match=REFUSED.format("gate")):
        wrapper.load_weights_from_tensors(*learning)
    with torch.no_grad():
        wrapper.load_weights_from_tensors(*learning)
    hidden, ids, scores = inputs().values()
    with pytest.raises(RuntimeError, match=REFUSED.format("hidden_states")):
        wrapper.forward(hidden.requires_grad_(), ids, scores)
    with torch.no_grad():
        assert not wrapper.forward(hidden, ids, scores).requires_grad
