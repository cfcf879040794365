"""What arrays hold is told by dtypes and shapes, by `given`, or by what `quantize` returns."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
import torch

import ktk
from ktk import Format
from ktk.expert import Expert, Matrix
from ktk.formats import format_named, label
from ktk.given import read_matrix
from ktk.quantize import Quantized, quantize

E, H, I = 2, 256, 160  # noqa: E741
PARTS = {"gate": (I, H), "up": (I, H), "down": (H, I)}
BLOCKS = Format("e4m3", "f32", "none", 128, 128)
ROWS = Format("e4m3", "f32", "none", 1, 0)
MXFP8 = Format("e4m3", "ue8m0", "none", 1, 32)
MXFP4 = Format("e2m1", "ue8m0", "none", 1, 32)
INT4 = Format("u4", "bf16", "none", 1, 32)
INT8 = Format("i8", "f32", "none", 1, 0)
GPTQ = Format("u4", "f16", "u8", 1, 32)


def floats() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(E, *shape, generator=generator) for name, shape in PARTS.items()}


def make(backend: str) -> ktk.MoE:
    sizes: dict[str, Any] = {
        "num_experts": E,
        "num_experts_per_tok": 1,
        "hidden_size": H,
        "intermediate_size": I,
    }
    return ktk.load_backend(backend).moe(**sizes, pool=ktk.WorkerPool(1, pin=False))


def arrays_of(made: dict[str, Quantized]) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    for name, one in made.items():
        arrays |= {name: one.data, f"{name}_scale": one.scale, f"{name}_zero": one.zero}
    return arrays


def same_weights(a: ktk.MoE, b: ktk.MoE) -> bool:
    return a.format == b.format and all(
        np.array_equal(np.asarray(x), np.asarray(y))
        for expert in range(E)
        for x, y in zip(a.unpack_expert(expert), b.unpack_expert(expert), strict=True)
    )


def typed(made: Quantized) -> Quantized:
    """Give bytes the dtypes that torch has for them."""
    dtypes = {"e4m3": torch.float8_e4m3fn, "e2m1": torch.float4_e2m1fn_x2}
    data = made.data.view(dtypes[made.format.element])
    scale = made.scale
    if made.format.scale == "ue8m0":
        assert scale is not None
        scale = scale.view(torch.float8_e8m0fnu)
    return Quantized(made.format, data, scale)


CASES = [("FP8", BLOCKS), ("FP8", ROWS), ("FP8", MXFP8), ("MXFP4", MXFP4)]


@pytest.mark.parametrize(("backend", "fmt"), CASES, ids=str)
def test_small_floats_of_torch_are_recognized(backend: str, fmt: Format) -> None:
    made = {name: quantize(weight, fmt) for name, weight in floats().items()}
    expected = make(backend).load(**arrays_of(made), given=fmt)
    assert expected.format == fmt
    told = {name: typed(one) for name, one in made.items()}
    assert same_weights(make(backend).load(**arrays_of(told)), expected)
    # Where something is said too, it must be the same.
    assert same_weights(make(backend).load(**arrays_of(told), given=label(fmt)), expected)
    if fmt.scale == "ue8m0":
        in_bytes = {n: Quantized(fmt, one.data, made[n].scale) for n, one in told.items()}
        assert same_weights(make(backend).load(**arrays_of(in_bytes)), expected)


def test_e5m2_is_no_e4m3() -> None:
    data = torch.zeros(I, H).to(torch.float8_e5m2)
    arrays: dict[str, Any] = dict.fromkeys(PARTS, data)
    with pytest.raises(ValueError, match="FP8 does not take e5m2 for gate; it takes e4m3 with f32"):
        make("FP8").load_expert(0, **arrays, gate_scale=torch.ones(I, 1))
    with pytest.raises(ValueError, match="gate holds e5m2, but given says e4m3"):
        make("FP8").load_expert(0, **arrays, gate_scale=torch.ones(I, 1), given=ROWS)
    other: dict[str, Any] = dict.fromkeys(PARTS, data.to(torch.float8_e4m3fnuz))
    with pytest.raises(TypeError, match=r"gate has dtype float8_e4m3fnuz; .* reads float8_e4m3fn"):
        make("FP8").load_expert(0, **other)


def test_scales_that_fit_nothing_are_named_with_what_would() -> None:
    made = typed(quantize(floats()["gate"][0], BLOCKS))
    arrays: dict[str, Any] = dict.fromkeys(PARTS, made.data)
    message = re.escape("gate is e4m3 [160, 256] with scales [3, 2] float32, but FP8 takes e4m3 ")
    with pytest.raises(ValueError, match=message + r".*128 x 128, which is scales \[2, 2\]; or"):
        make("FP8").load_expert(0, **arrays, gate_scale=torch.ones(3, 2))
    with pytest.raises(ValueError, match="with scales missing"):
        make("FP8").load_expert(0, **arrays)


def test_bytes_without_a_word_are_refused_with_the_cure() -> None:
    made = quantize(floats()["gate"][0], ROWS)
    arrays: dict[str, Any] = dict.fromkeys(PARTS, made.data)
    message = "gate is uint8, which may be .* given='e4m3-f32-128x128'; FP8 takes e4m3 with f32"
    with pytest.raises(ValueError, match=message):
        make("FP8").load_expert(0, **arrays, gate_scale=made.scale)


@pytest.mark.parametrize(
    ("shape", "scales", "expected"),
    [
        ((96, 192), (96, 3), 64),
        ((96, 192), (96, 2), 128),  # the last group is half a group
        ((96, 192), (96, 1), 0),
        ((96, 64), (96, 1), 64),  # 64, 128 and rows are the same here: the first is taken
        ((96, 256), (96,), 0),  # one per row
    ],
)
def test_groups_follow_from_the_number_of_scales(
    shape: tuple[int, ...], scales: tuple[int, ...], expected: int
) -> None:
    accepts = [Format("i8", "f32", "none", 1, group) for group in (64, 128, 0)]
    data = np.zeros((shape[0], shape[-1]), np.int8)
    found = read_matrix("w", Matrix(None, data, np.ones(scales, np.float32)), "DEMO", accepts)
    assert found.format == Format("i8", "f32", "none", 1, expected)


def test_groups_that_could_be_two_are_asked_for() -> None:
    accepts = [Format("i8", "f32", "none", 1, group) for group in (48, 64)]
    data, scale = np.zeros((8, 130), np.int8), np.ones((8, 3), np.float32)
    with pytest.raises(ValueError, match=r"w: scales \[8, 3\] float32 .* may mean .* given="):
        read_matrix("w", Matrix(None, data, scale), "DEMO", accepts)
    found = read_matrix("w", Matrix(accepts[1], data, scale), "DEMO", accepts)
    assert found.format == accepts[1]


@pytest.mark.parametrize(
    ("backend", "fmt"),
    [*CASES, ("AMXINT8", INT8), ("RAWINT4", INT4), ("AMXINT4", GPTQ)],
    ids=str,
)
def test_what_quantize_returns_goes_into_load(backend: str, fmt: Format) -> None:
    weights = floats()
    stacks: dict[str, Any] = {name: quantize(weight, fmt) for name, weight in weights.items()}
    loaded = make(backend).load(**stacks)
    assert loaded.format == fmt
    assert same_weights(loaded, make(backend).load(**arrays_of(stacks), given=fmt))
    one_by_one = make(backend)
    for expert in range(E):
        one: dict[str, Any] = {name: quantize(part[expert], fmt) for name, part in weights.items()}
        one_by_one.load_expert(expert, **one)
    assert same_weights(one_by_one, loaded)
    in_lists: dict[str, Any] = {
        name: [stack[expert] for expert in range(E)] for name, stack in stacks.items()
    }
    assert same_weights(make(backend).load(**in_lists), loaded)


def test_what_belongs_to_quantized_is_not_given_twice() -> None:
    stacks: dict[str, Any] = {name: quantize(weight, INT8) for name, weight in floats().items()}
    with pytest.raises(ValueError, match="gate is Quantized and has its scales: gate_scale is too"):
        make("AMXINT8").load(**stacks, gate_scale=stacks["gate"].scale)
    with pytest.raises(ValueError, match=r"gate is Quantized in i8 .*, but given says e4m3"):
        make("AMXINT8").load(**stacks, given=BLOCKS)
    with pytest.raises(TypeError, match=r"expected a stack of matrices, got one of \[160, 256\]"):
        make("AMXINT8").load(**{name: stack[0] for name, stack in stacks.items()})


def test_any_library_and_any_name_will_do_for_quantize() -> None:
    weight = floats()["gate"]
    expected = quantize(weight[1], BLOCKS)
    read_only = weight.numpy().copy()
    read_only.flags.writeable = False
    for made in (
        quantize(weight, "e4m3 128x128"),
        quantize(read_only, str(BLOCKS)),
        quantize(torch.nn.Parameter(weight), label(BLOCKS)),
    ):
        assert made.format == BLOCKS
        assert torch.equal(made[1].data, expected.data)
        assert expected.scale is not None
        assert torch.equal(made.scale[1], expected.scale)  # type: ignore[index]
        assert torch.equal(made.dequantize()[1], expected.dequantize())
    with pytest.raises(TypeError, match="weight must be an array, of any library, got list"):
        quantize([[1.0]], BLOCKS)
    with pytest.raises(ValueError, match=r"matrix \[n, k\] or a stack of them, got shape \[4\]"):
        quantize(torch.ones(4), BLOCKS)
    with pytest.raises(ValueError, match=r"weight must hold floats, got torch.int8"):
        quantize(torch.ones(4, 4, dtype=torch.int8), BLOCKS)


@pytest.mark.parametrize("name", ["BF16", "AMXINT4", "AMXINT8", "FP8", "MXFP4", "RAWINT4"])
def test_every_format_has_a_name(name: str) -> None:
    for fmt in (*ktk.load_backend(name).formats, *ktk.load_backend(name).accepts):
        if fmt.scale != "none":
            assert format_named(label(fmt)) == fmt
        assert str(format_named(str(fmt))) == str(fmt)


@pytest.mark.parametrize(
    "text",
    [
        *("", "e9m9", "e4m3-f32", "u4-bf16-zero", "u4-bf16-f16-g32", "e4m3 128 x 128", "u4-gx"),
        *("u4-bf16-g4294967296", f"u4-bf16-g{'9' * 5000}", "e4m3-f32-4294967297x128"),
        "e4m3 with f32 scales per 1 x 99999999999",
    ],
    ids=lambda text: text[:40],
)
def test_what_is_no_format_is_said_with_names_of_such(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not the name of a format .* such as bf16"):
        format_named(text)


def strided(weight: torch.Tensor) -> torch.Tensor:
    """Return the same values, in the memory of the transpose."""
    made = weight.mT.contiguous().mT
    assert made.stride(-1) != 1
    return made


@pytest.mark.parametrize("backend", ["BF16", "AMXINT8"])
def test_rows_that_are_not_contiguous_are_taken(backend: str) -> None:
    weights = floats()
    expected = make(backend).load(**weights)
    across: dict[str, Any] = {name: strided(weight) for name, weight in weights.items()}
    assert same_weights(make(backend).load(**across), expected)
    wide = {name: weight.repeat_interleave(2, -1)[..., ::2] for name, weight in weights.items()}
    assert same_weights(make(backend).load(**wide), expected)
    numpy: dict[str, Any] = {name: weight.numpy() for name, weight in across.items()}
    assert same_weights(make(backend).load(**numpy), expected)
    turned: dict[str, Any] = {
        name: weight.numpy()[:, ::-1].copy()[:, ::-1] for name, weight in weights.items()
    }
    assert same_weights(make(backend).load(**turned), expected)
    wrapper = ktk.KTMoEWrapper(0, E, 1, H, I, method=backend)
    wrapper.load_weights_from_tensors(*across.values())
    assert wrapper.moe is not None
    assert same_weights(wrapper.moe, expected)


def test_scales_zeros_and_biases_may_be_strided_as_well() -> None:
    stacks = {name: quantize(weight, GPTQ) for name, weight in floats().items()}
    arrays = arrays_of(stacks)
    biases = {f"{name}_bias": torch.randn(E, shape[0]) for name, shape in PARTS.items()}
    expected = make("AMXINT4").load(**arrays, **biases, given=GPTQ)
    across = {name: strided(array) for name, array in (arrays | biases).items()}
    found = make("AMXINT4").load(**across, given=GPTQ)
    assert same_weights(found, expected)
    call = (torch.ones(1, H), torch.tensor([[1]]), torch.ones(1, 1))
    assert torch.equal(found(*call), expected(*call))


def test_a_refusal_lists_each_format_once() -> None:
    """AMXINT4 makes ten formats of floats, and takes each kind of floats once."""
    with pytest.raises(ValueError, match="AMXINT4 does not take weights in e2m1") as caught:
        ktk.load_backend("AMXINT4").core.stored_as(Format("e2m1", "ue8m0", "none", 1, 32), 256, 256)
    listed = str(caught.value).partition("; it takes ")[2].split("; ")
    assert listed[:3] == ["bf16", "f16", "f32"]
    assert len(listed) == len(set(listed)) > 5


def test_an_expert_goes_into_a_layer_as_its_arrays_do() -> None:
    weights = floats()
    made = {name: [quantize(one, GPTQ) for one in weight] for name, weight in weights.items()}
    whole, taken_apart = make("AMXINT4"), make("AMXINT4")
    for e in range(E):
        expert = Expert(**{name: made[name][e] for name in PARTS})
        whole.load_expert(e, expert)
        taken_apart.load_expert(e, **expert.arrays(), given=GPTQ)
    assert same_weights(whole, taken_apart)


def test_a_bias_goes_with_its_matrix() -> None:
    weights, bias = floats(), torch.randn(I)
    with_bias, beside = make("BF16"), make("BF16")
    x, ids = torch.randn(3, H).bfloat16(), torch.zeros(3, 1, dtype=torch.int32)
    gate, up, down = (Matrix(None, weights[name][0]) for name in PARTS)
    with_bias.load_expert(0, Expert(gate=dataclasses.replace(gate, bias=bias), up=up, down=down))
    beside.load_expert(0, gate, up, down, gate_bias=bias)
    results = [moe(x, ids, torch.ones(3, 1)) for moe in (with_bias, beside)]
    assert torch.equal(*results)
    beside.load_expert(0, gate, up, down)
    assert not torch.equal(results[0], beside(x, ids, torch.ones(3, 1)))


def test_what_is_said_beside_an_expert_is_refused() -> None:
    moe, weights = make("BF16"), floats()
    gate, up, down = (Matrix(None, weights[name][0], bias=torch.zeros(1)) for name in PARTS)
    for beside in ({"up": up}, {"down_bias": torch.zeros(H)}, {"given": Format("bf16")}):
        with pytest.raises(TypeError, match="an Expert has all that belongs to it"):
            moe.load_expert(0, Expert(gate=gate, up=up, down=down), **beside)
    with pytest.raises(TypeError, match="down is missing: give gate, up and down, or an Expert"):
        moe.load_expert(0, gate, up)
    with pytest.raises(ValueError, match="gate is Matrix and has its bias: gate_bias is too much"):
        moe.load_expert(0, gate, up, down, gate_bias=torch.zeros(I))


def test_arrays_and_experts_are_made_of_each_other() -> None:
    arrays = {"gate": 1, "gate_scale": 2, "up": 3, "up_zero": 4, "down": 5, "down_bias": 6}
    expert = Expert.of_arrays(arrays, dict.fromkeys(PARTS, INT8))
    assert expert.arrays() == arrays
    assert expert.gate is not None
    assert (expert.gate.scale, expert.up.zero, expert.down.bias) == (2, 4, 6)
    assert {matrix.format for matrix in expert.matrices.values()} == {INT8}
