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

from ktk import CheckpointError
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


def gptq(n: int, k: int, seed: int) -> tuple[schemes.Tensors, np.ndarray]:
    """Return a matrix of GPTQ, without g_idx, which vLLM drops, and its values."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    source = formats.make_source(schemes.U4_ZERO, weight, rng)
    source = schemes.clipped(source, 1, 15)  # stored minus one, in four bits
    tensors = schemes.gptq(source)
    del tensors[".g_idx"]
    return tensors, source.values


def fp8(n: int, k: int, seed: int) -> tuple[schemes.Tensors, np.ndarray]:
    """Return a matrix of FP8 in blocks of 128 rows and columns, and its values."""
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((n, k)).astype(np.float32)
    source = formats.make_source(schemes.BLOCK, weight, rng)
    return schemes.fp8(source), source.values


def matrix_of(method: Any, layer: Layer, columns: int) -> torch.Tensor:
    """Return the weights that rows with a single one are multiplied by: codes exactly, decoded
    ones rounded to bf16.
    """
    result: torch.Tensor = method.apply(layer, torch.eye(columns)).T
    return result


N, K = (64, 96), 256
GPTQ = schemes.GPTQ_CONFIG
DESC_ACT = {**GPTQ, "desc_act": True}
MATRICES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (gptq, GPTQ),
    "fp8": (fp8, schemes.FP8_CONFIG),
}


def give(layer: Layer, part: Any, tensors: schemes.Tensors) -> None:
    """Hand over the tensors of one part, or of all in one."""
    for suffix, tensor in tensors.items():
        param = layer.get_parameter(suffix.removeprefix("."))
        more = () if part is None else (part,)
        param.weight_loader(param, tensor, *more)  # type: ignore[attr-defined]


def loaded(
    linears: ModuleType,
    layer: Layer,
    matrices: dict[Any, schemes.Tensors],
    k: int,
    quantization: dict[str, Any] = GPTQ,
) -> Any:
    """Make a method and give it the tensors of all parts, one after the other."""
    name, refusal = "model.layers.0.mlp.gate_up_proj", ValueError("no kernel")
    method = linears.KtkDense(name, quantization, refusal)
    sizes = [n // layer.tp_size if k == K else n for n in layer.output_sizes]
    method.create_weights(layer, k, sizes, K, layer.output_size, torch.bfloat16)
    for part, tensors in matrices.items():
        give(layer, part, tensors)
    method.process_weights_after_loading(layer)
    return method


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_rank_has_its_rows_of_all_parts(linears: ModuleType, rank: int, ranks: int) -> None:
    layer = Layer(list(N), min(rank, ranks - 1), ranks)
    made = {part: gptq(n, K, part) for part, n in enumerate(N)}
    method = loaded(linears, layer, {part: one for part, (one, _) in made.items()}, K)
    halves = (np.split(values, ranks)[layer.tp_rank] for _, values in made.values())
    wanted = np.concatenate(list(halves))
    np.testing.assert_allclose(matrix_of(method, layer, K), wanted, rtol=2**-8, atol=2**-20)


@pytest.mark.parametrize("together", [(0, 1, 2), (2, 3), (1,), None])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", MATRICES)
def test_several_parts_may_come_in_one_tensor(
    linears: ModuleType, name: str, ranks: int, together: tuple[int, ...] | None
) -> None:
    """As q, k and v of Qwen3.5's linear attention do, beside z."""
    make, quantization = MATRICES[name]
    sizes = [128, 64, 96, 128]
    joined = tuple(range(4)) if together is None else together
    tensors, whole = make(sum(sizes[part] for part in joined), K, 4)
    given: dict[Any, schemes.Tensors] = {together: tensors}
    cuts = np.cumsum([sizes[part] for part in joined])[:-1]
    values = dict(zip(joined, np.split(whole, cuts), strict=True))
    for part in {0, 1, 2, 3}.difference(joined):
        given[part], values[part] = make(sizes[part], K, part)

    layer = Layer(sizes, ranks - 1, ranks)
    method = loaded(linears, layer, given, K, quantization)
    wanted = np.concatenate([np.split(values[part], ranks)[-1] for part in range(4)])
    np.testing.assert_allclose(matrix_of(method, layer, K), wanted, rtol=2**-8, atol=2**-20)


@pytest.mark.parametrize("part", [2, (1, 2), "q"])
def test_a_part_that_a_layer_does_not_have_is_an_error(linears: ModuleType, part: Any) -> None:
    with pytest.raises(CheckpointError, match=r"gate_up_proj has no part (2|'q')$"):
        loaded(linears, Layer(list(N)), {part: gptq(N[0], K, 0)[0]}, K)


def test_columns_that_are_divided_are_those_of_their_rank(linears: ModuleType) -> None:
    tensors, values = gptq(N[0], K, 5)
    layer = Layer([N[0]], 1, 2)
    method = loaded(linears, layer, {None: tensors}, K // 2)
    got = matrix_of(method, layer, K // 2)
    np.testing.assert_allclose(got, values[:, K // 2 :], rtol=2**-8, atol=2**-20)


def test_a_layer_that_came_again_in_part_is_an_error_until_the_rest_is_there(
    linears: ModuleType,
) -> None:
    layer = Layer(list(N))
    method = loaded(linears, layer, {part: gptq(n, K, part)[0] for part, n in enumerate(N)}, K)
    again = {part: gptq(n, K, part + 2) for part, n in enumerate(N)}
    give(layer, 0, again[0][0])
    sentence = (
        r"gate_up_proj is not whole: it has 2 parts of qweight, scales, qzeros each, and these "
        r"came: \{'0': \['qweight', 'qzeros', 'scales'\]\}$"
    )
    for _ in range(2):
        with pytest.raises(CheckpointError, match=sentence):
            method.process_weights_after_loading(layer)
    give(layer, 1, again[1][0])
    method.process_weights_after_loading(layer)
    wanted = np.concatenate([values for _, values in again.values()])
    np.testing.assert_allclose(matrix_of(method, layer, K), wanted, rtol=2**-8, atol=2**-20)


def test_calls_are_errors_while_a_part_is_missing_and_old_parts_do_not_count(
    linears: ModuleType,
) -> None:
    """As with `model.load_weights`, after which vLLM says nothing."""
    layer = Layer([N[0], N[1], N[0]])
    made = [
        {part: gptq(n, K, 10 * update + part) for part, n in enumerate(layer.output_sizes)}
        for update in range(3)
    ]
    method = loaded(linears, layer, {part: one for part, (one, _) in made[0].items()}, K)
    for part in (0, 2):
        give(layer, part, made[1][part][0])
    with pytest.raises(CheckpointError, match=r"it has 3 parts .* these came: \{'0': .* '2': "):
        matrix_of(method, layer, K)
    for part, (tensors, _) in made[2].items():
        give(layer, part, tensors)
    wanted = np.concatenate([values for _, values in made[2].values()])
    np.testing.assert_allclose(matrix_of(method, layer, K), wanted, rtol=2**-8, atol=2**-20)


@pytest.mark.parametrize("early", [0, 2])
def test_a_part_that_came_before_a_whole_update_is_replaced_by_that(
    linears: ModuleType, early: int
) -> None:
    layer = Layer([N[0], N[1], N[0]])
    made = [
        {part: gptq(n, K, 10 * update + part) for part, n in enumerate(layer.output_sizes)}
        for update in range(4)
    ]
    method = loaded(linears, layer, {part: one for part, (one, _) in made[0].items()}, K)
    give(layer, early, made[1][early][0])
    for update in (2, 3):
        for part, (tensors, _) in made[update].items():
            give(layer, part, tensors)
        if update == 3:  # of the one before, no call has been made
            wanted = np.concatenate([values for _, values in made[3].values()])
            got = matrix_of(method, layer, K)
            np.testing.assert_allclose(got, wanted, rtol=2**-8, atol=2**-20)
    # After a call, one part alone is none of a whole update.
    give(layer, early, made[1][early][0])
    with pytest.raises(CheckpointError, match="is not whole"):
        matrix_of(method, layer, K)


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "bitsandbytes"}, {"quant_method": "hqq"}, DESC_ACT]
)
def test_what_neither_computes_is_one_sentence(
    linears: ModuleType, quantization: dict[str, Any]
) -> None:
    no_kernel = NotImplementedError("no kernel on this CPU")
    sentence = (
        r"^model\.layers\.0\.mlp\.down_proj: vLLM says 'no kernel on this CPU', and ktk does not "
        r"compute weights stored by [\w ()]+ in vLLM: ktk serve MODEL --engine transformers reads "
        r"them from the model's files$"
    )
    with pytest.raises(ValueError, match=sentence) as caught:
        linears.KtkDense("model.layers.0.mlp.down_proj", quantization, no_kernel)
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
    assert "GPTQ in 4 bits with sorted columns (desc_act)" in experts.unable(layer, DESC_ACT)
    assert not experts.unable(layer, GPTQ)


def test_what_nobody_knows_is_left_to_vllm(linears: ModuleType) -> None:
    with pytest.raises(NotImplementedError, match="no kernel"):
        linears.KtkDense("any", {"quant_method": "next year's"}, NotImplementedError("no kernel"))


@pytest.mark.parametrize("parts", [[0, 1], [None], [(0, 1)], [(0,), 1]])
def test_vllm_can_count_what_comes_before_it_loads(linears: ModuleType, parts: list[Any]) -> None:
    layer = Layer(list(N))
    rows = [sum(N)] if len(parts) == 1 else N
    made = {part: gptq(n, K, 0)[0] for part, n in zip(parts, rows, strict=True)}
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
    assert counted.elements == wanted == len(N) * len(made[parts[0]])
    assert torch.equal(matrix_of(method, layer, K), before)
