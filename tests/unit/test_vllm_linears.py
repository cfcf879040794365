"""Dense layers of vLLM, as far as they need none: stand-ins take the place of what is imported."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import schemes
import torch
from vllm_stand_ins import Copied, imported

from ktk.expert import Matrix
from ktk.quantize import dequantize, quantize
from ktk.testing import formats


@pytest.fixture
def linears(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported("ktk.vllm.linears", monkeypatch) as module:
        yield module


def test_a_decoded_matrix_has_its_factor_once(linears: ModuleType) -> None:
    weight = quantize(torch.randn(8, 64) * 0.01, "e2m1-e4m3-g16", factor=0.001)
    matrix = Matrix(weight.format, weight.data, weight.scale, factor=weight.factor)
    decoded = linears._decoded(matrix)
    assert decoded.factor is None
    assert torch.equal(decoded.data, dequantize(matrix).bfloat16())


class Layer(torch.nn.Module):
    """A layer of vLLM, as far as it says which part of a matrix is whose."""

    def __init__(self, sizes: list[int], rank: int = 0, ranks: int = 1) -> None:
        super().__init__()
        self.output_sizes, self.output_size = sizes, sum(sizes)
        self.tp_rank, self.tp_size = rank, ranks


def unsorted(n: int, k: int, seed: int) -> tuple[schemes.Tensors, np.ndarray]:
    """Return a matrix of GPTQ with desc_act, and what it means."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    source = formats.make_source(schemes.U4_ZERO, weight, rng)
    source = schemes.clipped(source, 1, 15)  # stored minus one, in four bits
    order = rng.permutation(k)
    tensors = schemes.gptq(source) | {
        ".qweight": schemes.words(schemes.codes_of(source)[:, order].T, 0),
        ".g_idx": torch.from_numpy(order // 32).int(),
    }
    return tensors, source.values[:, order]


def matrix_of(method: Any, layer: Layer, columns: int) -> torch.Tensor:
    """Return the weights that rows with a single one are multiplied by: codes exactly, decoded
    ones rounded to bf16.
    """
    result: torch.Tensor = method.apply(layer, torch.eye(columns)).T
    return result


N, K = (64, 96), 256
DESC_ACT = {**schemes.GPTQ_CONFIG, "desc_act": True}


def give(layer: Layer, part: Any, tensors: schemes.Tensors) -> None:
    """Hand over the tensors of one part, or of all in one."""
    for suffix, tensor in tensors.items():
        param = layer.get_parameter(suffix.removeprefix("."))
        more = () if part is None else (part,)
        param.weight_loader(param, tensor, *more)  # type: ignore[attr-defined]


def loaded(linears: ModuleType, layer: Layer, matrices: dict[Any, schemes.Tensors], k: int) -> Any:
    """Make a method and give it the tensors of all parts, one after the other."""
    method = linears.KtkDense("model.layers.0.mlp.gate_up_proj", DESC_ACT, ValueError("no kernel"))
    sizes = [n // layer.tp_size if k == K else n for n in layer.output_sizes]
    method.create_weights(layer, k, sizes, K, layer.output_size, torch.bfloat16)
    for part, tensors in matrices.items():
        give(layer, part, tensors)
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_columns_of_gptq_in_any_order_keep_their_places(
    linears: ModuleType, rank: int, ranks: int
) -> None:
    layer = Layer(list(N), min(rank, ranks - 1), ranks)
    made = {part: unsorted(n, K, part) for part, n in enumerate(N)}
    method = loaded(linears, layer, {part: one for part, (one, _) in made.items()}, K)
    halves = (np.split(values, ranks)[layer.tp_rank] for _, values in made.values())
    wanted = np.concatenate(list(halves))
    np.testing.assert_allclose(matrix_of(method, layer, K), wanted, rtol=2**-8, atol=2**-20)


def test_columns_that_are_divided_are_those_of_their_rank(linears: ModuleType) -> None:
    tensors, values = unsorted(N[0], K, 5)
    layer = Layer([N[0]], 1, 2)
    method = loaded(linears, layer, {None: tensors}, K // 2)
    got = matrix_of(method, layer, K // 2)
    np.testing.assert_allclose(got, values[:, K // 2 :], rtol=2**-8, atol=2**-20)


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq"])
def test_what_neither_computes_is_one_sentence(linears: ModuleType, method: str) -> None:
    no_kernel = NotImplementedError("no kernel on this CPU")
    sentence = (
        r"^model\.layers\.0\.mlp\.down_proj: vLLM says 'no kernel on this CPU', and ktk does not "
        r"compute weights stored by \w+ in vLLM: ktk serve MODEL --engine transformers reads them "
        r"from the model's files$"
    )
    with pytest.raises(ValueError, match=sentence) as caught:
        linears.KtkDense("model.layers.0.mlp.down_proj", {"quant_method": method}, no_kernel)
    assert caught.value.__cause__ is no_kernel


def test_experts_are_left_to_vllm_with_the_same_words(linears: ModuleType) -> None:
    experts: Any = importlib.import_module("ktk.vllm.experts")
    plain = {"swiglu_alpha": None, "swiglu_limit": None, "swiglu_beta": None}
    silu = SimpleNamespace(activation=SimpleNamespace(value="silu"), **plain)
    silu.is_act_and_mul, silu.is_lora_enabled = True, False
    layer = SimpleNamespace(moe_config=silu)
    assert experts.unable(layer, {"quant_method": "hqq"}) == (
        "weights stored by HQQ in vLLM: ktk serve MODEL --engine transformers reads them from the "
        "model's files"
    )
    assert experts.unable(layer, {"quant_method": "next year's"}) == (
        "weights stored as next year's"
    )
    assert not experts.unable(layer, DESC_ACT)


def test_what_nobody_knows_is_left_to_vllm(linears: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="no kernel"):
        linears.KtkDense("any", {"quant_method": "next year's"}, NotImplementedError("no kernel"))


def test_vllm_can_count_what_comes_before_it_loads(linears: ModuleType) -> None:
    layer = Layer(list(N))
    made = {part: unsorted(n, K, part)[0] for part, n in enumerate(N)}
    method = loaded(linears, layer, made, K)
    before = matrix_of(method, layer, K)
    wanted = 0
    for name, param in layer.named_parameters():
        meta = torch.nn.Parameter(param.data.to("meta"), requires_grad=False)
        meta.__dict__.update(param.__dict__)
        assert param.weight_loader.__name__, "vLLM asks for a name"  # type: ignore[attr-defined]
        wanted += param.weight_loader_numel  # type: ignore[attr-defined]
        layer.register_parameter(name, meta)
    with Copied() as counted:
        for part, tensors in made.items():
            give(layer, part, {name: tensor * 0 for name, tensor in tensors.items()})
    assert counted.elements == wanted == len(N) * len(made[0])
    assert torch.equal(matrix_of(method, layer, K), before)
