"""Experts are packed from tensors that come in any order, as soon as they are whole."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest
import torch
from schemes import (
    AWQ_CONFIG,
    BLOCK,
    MXFP4,
    SCHEMES,
    SIZES,
    U4_ZERO,
    E,
    H,
    I,
    Tensors,
    awq,
    ct,
    fp8,
    fp8_row,
    sources,
    tensor,
    with_zeros,
)

import ktk
from ktk import CheckpointError, ExpertCollector, Format, MoEConfig
from ktk.errors import CheckpointFormatError
from ktk.testing import formats

CONFIG = MoEConfig(num_experts=E, num_experts_per_tok=1, hidden_size=H, intermediate_size=I)
Come = list[tuple[int, str, str, torch.Tensor]]
Matrices = dict[tuple[str, int], formats.Source]


def tensors_by_role(made: Tensors) -> Tensors:
    return {suffix.lstrip("."): one for suffix, one in made.items()}


def stream(matrices: Matrices, make: Any) -> Come:
    return [
        (e, part, role, one)
        for (part, e), source in matrices.items()
        for role, one in tensors_by_role(make(source)).items()
    ]


def shuffled(come: Come, seed: int) -> Come:
    order = np.random.default_rng(seed).permutation(len(come))
    return [come[i] for i in order]


def collect(come: Come, config: MoEConfig = CONFIG, **options: Any) -> ktk.MoE:
    roles = list(dict.fromkeys(role for _, _, role, _ in come if role != "bias"))
    collector = ExpertCollector(config, roles, **options)
    for one in come:
        collector.take(*one)
    return collector.finish()


def floats(count: int = E, dtype: torch.dtype = torch.bfloat16) -> Come:
    made = torch.Generator().manual_seed(0)
    return [
        (e, part, "weight", torch.randn(size, generator=made).to(dtype))
        for e in range(count)
        for part, size in SIZES.items()
    ]


def assert_stored(moe: ktk.MoE, matrices: Matrices) -> None:
    for e in range(E):
        for part, found in zip(SIZES, moe.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(found, matrices[part, e].values.astype(np.float32))


@pytest.mark.parametrize("name", SCHEMES)
def test_every_scheme_is_packed_whatever_the_order(name: str) -> None:
    fmt, make, config = SCHEMES[name]
    matrices = with_zeros(1, 16) if fmt == U4_ZERO else sources(fmt)
    for seed in range(3):
        moe = collect(shuffled(stream(matrices, make), seed), quantization=config)
        assert moe.format is not None
        assert moe.format.same_as(fmt, I, H)
        assert_stored(moe, matrices)


def test_awq() -> None:
    matrices = with_zeros(0, 15)
    moe = collect(stream(matrices, awq), quantization=AWQ_CONFIG)
    assert_stored(moe, matrices)


def test_codes_that_share_a_tensor_alternate_or_follow_each_other() -> None:
    matrices = sources(MXFP4)
    for interleaved in (True, False):
        come: Come = []
        for e in range(E):
            for role, name in (("blocks", "data"), ("scales", "scale")):
                gate, up, down = (tensor(getattr(matrices[part, e], name)) for part in SIZES)
                both = torch.stack([gate, up], 1).flatten(0, 1)
                if not interleaved:
                    both = torch.cat([gate, up])
                for part, one in (("down", down), ("gate_up", both)):
                    blocks = one.view(one.shape[0], -1, 16) if role == "blocks" else one
                    come.append((e, part, role, blocks))
        bias = {part: torch.randn(size[0]) for part, size in SIZES.items()}
        both = torch.stack([bias["gate"], bias["up"]], 1).flatten()
        if not interleaved:
            both = torch.cat([bias["gate"], bias["up"]])
        for e in range(E):
            come += [(e, "gate_up", "bias", both), (e, "down", "bias", bias["down"])]
        moe = collect(shuffled(come, 0), interleaved=interleaved, bias=True)
        assert moe.backend.name == "MXFP4"
        assert_stored(moe, matrices)
        decoded = collect(come, interleaved=interleaved, bias=True, backend="BF16")
        assert_biases(decoded, bias)


def assert_biases(moe: ktk.MoE, bias: Tensors, *more: ktk.MoE) -> None:
    """Of a token of zeros, biases are all that is left; further layers are other ranks'."""
    hidden = moe.config.hidden_size
    ids, weights = torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    got = sum(one(torch.zeros(1, hidden), ids, weights)[0].double() for one in (moe, *more))
    down = np.concatenate([one.unpack_expert(0)[2] for one in (moe, *more)], axis=1)
    gate, up, last = (bias[part].double() for part in SIZES)
    inner = torch.nn.functional.silu(gate) * up
    each = torch.from_numpy(down).double()
    # BF16 rounds what goes into down to 8 bits: by half a unit of the last of these.
    bound = 2**-8 * (each.abs() @ inner.abs() + last.abs())
    assert ((got - (each @ inner + last)).abs() <= bound).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_transposed_floats(interleaved: bool, dtype: torch.dtype) -> None:
    come = floats(dtype=dtype)
    by_name = {(e, part): one for e, part, _, one in come}
    joined: Come = []
    for e in range(E):
        gate, up = by_name[e, "gate"], by_name[e, "up"]
        both = torch.stack([gate, up], 1).flatten(0, 1) if interleaved else torch.cat([gate, up])
        joined.append((e, "gate_up", "weight", both.T))
        joined.append((e, "down", "weight", by_name[e, "down"].T))
    moe = collect(joined, interleaved=interleaved, transposed=True)
    expected = collect(come)
    for e in range(E):
        for got, want in zip(moe.unpack_expert(e), expected.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(got, want)


def test_backends_that_take_no_codes_get_them_decoded() -> None:
    matrices = sources(BLOCK)
    moe = collect(stream(matrices, fp8), quantization=SCHEMES["fp8 by blocks"][2], backend="BF16")
    assert str(moe.format) == "bf16"
    for e in range(E):
        for part, found in zip(SIZES, moe.unpack_expert(e), strict=True):
            expected = torch.from_numpy(matrices[part, e].values).float().bfloat16().float()
            np.testing.assert_array_equal(found, expected.numpy())


def test_floats_are_quantized_for_a_backend_that_is_named() -> None:
    moe = collect(floats(), backend="AMXINT8")
    expected = ktk.load_backend("AMXINT8").moe(
        num_experts=E, num_experts_per_tok=1, hidden_size=H, intermediate_size=I
    )
    by_name = {(part, e): one for e, part, _, one in floats()}
    for e in range(E):
        expected.load_expert(e, *(by_name[part, e] for part in SIZES))
        for got, want in zip(moe.unpack_expert(e), expected.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(got, want)


def test_an_existing_layer_is_filled() -> None:
    moe = ktk.load_backend("BF16").moe(
        num_experts=E, num_experts_per_tok=1, hidden_size=H, intermediate_size=I
    )
    collector = ExpertCollector(moe)
    for one in floats():
        collector.take(*one)
    assert collector.finish() is moe
    assert moe.nbytes > 0


def test_few_raw_experts_exist() -> None:
    """Tensors are let go with their expert: those alive are never more than one expert's."""
    count = 16
    config = MoEConfig(num_experts=count, num_experts_per_tok=1, hidden_size=H, intermediate_size=I)
    collector = ExpertCollector(config)
    whole = 3 * H * I * 2
    alive: list[weakref.ref[torch.Tensor]] = []
    for e in range(count):
        for part, size in SIZES.items():
            one = torch.randn(size).bfloat16()
            alive.append(weakref.ref(one))
            assert collector.take(e, part, "weight", one) == (part == "down")
            del one
            assert sum(ref() is not None for ref in alive) <= 2
            assert collector.held_nbytes < whole
    assert collector.packed == count
    assert collector.held_nbytes == 0


def cut_names() -> list[str]:
    return ["floats", "fp8 by blocks", "fp8 by rows", "int4", "gptq", "mxfp4", "int8 by rows"]


@pytest.mark.parametrize("name", cut_names())
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_add_up_to_the_layer(name: str, ranks: int) -> None:
    """Each holds whole columns of what one process holds: the same codes, in the same places."""
    wide = MoEConfig(num_experts=1, num_experts_per_tok=1, hidden_size=128, intermediate_size=384)
    sizes = {"gate": (384, 128), "up": (384, 128), "down": (128, 384)}
    rng = np.random.default_rng(0)
    config: dict[str, Any] = {}
    if name == "floats":
        fmt = Format("bf16")
        make = lambda source: {".weight": source}  # noqa: E731
        made: Any = {part: torch.from_numpy(rng.standard_normal(n)) for part, n in sizes.items()}
        made = {part: one.bfloat16() for part, one in made.items()}
    else:
        fmt, make, config = SCHEMES[name]
        made = {
            part: formats.make_source(fmt, rng.standard_normal(n).astype(np.float32), rng)
            for part, n in sizes.items()
        }
        if fmt == U4_ZERO:
            zeroed = {part: np.clip(one.zero, 1, 15) for part, one in made.items()}
            for part, one in made.items():
                object.__setattr__(one, "zero", zeroed[part])
    come = [
        (0, part, role, one)
        for part, source in made.items()
        for role, one in tensors_by_role(make(source)).items()
    ]
    biases = {part: torch.randn(n[0]) for part, n in sizes.items()}
    come += [(0, part, "bias", bias) for part, bias in biases.items()]
    options: dict[str, Any] = {"quantization": config, "bias": True}
    whole = collect(come, wide, **options)
    parts = [collect(come, wide, rank=rank, ranks=ranks, **options) for rank in range(ranks)]
    assert sum(one.config.intermediate_size for one in parts) == 384
    gate, up, down = whole.unpack_expert(0)
    found = [one.unpack_expert(0) for one in parts]
    np.testing.assert_array_equal(np.concatenate([one[0] for one in found]), gate)
    np.testing.assert_array_equal(np.concatenate([one[1] for one in found]), up)
    np.testing.assert_array_equal(np.concatenate([one[2] for one in found], axis=1), down)
    # Biases of gate and up are cut, and that of down is added once.
    options |= {"backend": "BF16"}
    first, *others = (collect(come, wide, rank=r, ranks=ranks, **options) for r in range(ranks))
    assert_biases(first, biases, *others)


def test_ranks_that_cannot_be() -> None:
    matrices = sources(BLOCK)
    with pytest.raises(
        ValueError,
        match=r"an intermediate size of 160 .* cannot be divided over 3 ranks: 128 columns belong",
    ):
        collect(stream(matrices, fp8), rank=0, ranks=3)
    with pytest.raises(ValueError, match="rank must be from 0 to 1, got 2"):
        ExpertCollector(CONFIG, rank=2, ranks=2)


# --- errors --------------------------------------------------------------------------------------


def collector(**options: Any) -> ExpertCollector:
    return ExpertCollector(CONFIG, name="model.layers.3", **options)


def test_experts_that_did_not_come() -> None:
    one = collector()
    with pytest.raises(CheckpointError, match=r"model.layers.3: nothing came of experts 0-1"):
        one.finish()
    for e, part, role, weight in floats():
        if (e, part) != (1, "down"):
            one.take(e, part, role, weight)
    with pytest.raises(
        CheckpointError, match=r"model.layers.3: expert 1 is not whole: down weight did not come"
    ):
        one.finish()


def test_calls_that_make_no_sense() -> None:
    weight = floats()[0][3]
    one = collector()
    with pytest.raises(IndexError, match=r"model.layers.3: expert 2 is not one of 2"):
        one.take(2, "gate", "weight", weight)
    with pytest.raises(IndexError, match=r"expert -1 is not one of 2"):
        one.take(-1, "gate", "weight", weight)
    with pytest.raises(ValueError, match=r"part must be one of gate, up, down, gate_up, got 'w1'"):
        one.take(0, "w1", "weight", weight)
    with pytest.raises(
        ValueError,
        match=r"gate of expert 0 has a tensor 'bias', and those announced are weight$",
    ):
        one.take(0, "gate", "bias", weight)
    with pytest.raises(TypeError, match=r"weight must be a tensor of torch, got None"):
        one.take(0, "gate", "weight", None)  # type: ignore[arg-type]
    one.take(0, "gate", "weight", weight)
    with pytest.raises(ValueError, match=r"gate of expert 0: weight came twice"):
        one.take(0, "gate", "weight", weight)
    with pytest.raises(ValueError, match=r"gate_up of expert 0 came beside gate, which holds"):
        one.take(0, "gate_up", "weight", weight)
    for other in floats(1)[1:]:
        one.take(*other)
    with pytest.raises(ValueError, match=r"up of expert 0: weight came after the expert was"):
        one.take(0, "up", "weight", weight)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_may_come_again_when_all_were_there(ranks: int) -> None:
    one, come = collector(rank=ranks - 1, ranks=ranks), floats()
    for each in come:
        one.take(*each)
    moe = one.finish()
    other = [(e, part, role, -tensor) for e, part, role, tensor in come]
    cut = [(e, part, role, tensor[:1]) for e, part, role, tensor in other[:3]]
    one.take(*cut[0])
    one.take(*cut[1])
    with pytest.raises(CheckpointError, match="has a tensor weight of shape"):
        one.take(*cut[2])
    assert one.finish() is moe
    one.take(*come[0])  # given up
    for each in other:
        one.take(*each)
    assert one.finish() is moe
    fresh = collect(other, rank=ranks - 1, ranks=ranks)
    for e in range(E):
        for found, wanted in zip(moe.unpack_expert(e), fresh.unpack_expert(e), strict=True):
            np.testing.assert_array_equal(found, wanted)
    one.take(*come[0])
    with pytest.raises(CheckpointError, match=r"expert 0 is not whole: up weight, down weight did"):
        one.finish()


def test_tensors_that_are_wrong() -> None:
    bad = [(e, part, role, one[:, :64]) for e, part, role, one in floats()]
    with pytest.raises(
        CheckpointError,
        match=r"gate of expert 0 has a tensor weight of shape \[160, 64\], expected \[160, 192\]",
    ):
        collect(bad)
    integers = [(e, part, role, one.long()) for e, part, role, one in floats()]
    with pytest.raises(
        CheckpointError,
        match=r"gate of expert 0 has a tensor weight of type I64, expected BF16 or F16 or F32",
    ):
        collect(integers)
    come = stream(sources(BLOCK), fp8)
    come = [(e, part, role, one if role == "weight" else one[:1]) for e, part, role, one in come]
    with pytest.raises(
        CheckpointError, match=r"weight_scale_inv of shape \[1, 2\], expected .*\[2, 2\]"
    ):
        collect(come, quantization=SCHEMES["fp8 by blocks"][2])
    biases = floats() + [(e, part, "bias", torch.zeros(3)) for e in range(E) for part in SIZES]
    with pytest.raises(CheckpointError, match=r"bias of type .*float32 and shape \[3\], expected"):
        collect(biases, bias=True)


def test_what_no_scheme_has() -> None:
    with pytest.raises(ValueError, match=r"no way of storing .* has the tensors 'wgt'"):
        collector(roles=["wgt"])
    with pytest.raises(ValueError, match=r"weight_block_size is \[0\], expected a list of 2"):
        collector(quantization={"quant_method": "fp8", "weight_block_size": [0]})
    sym = ct(num_bits=8, type="int", strategy="channel", symmetric=False)
    come = stream(sources(SCHEMES["int8 by rows"][0]), SCHEMES["int8 by rows"][1])
    with pytest.raises(CheckpointError, match=r"gate of expert 0 has no zero points, though"):
        collect(come, quantization=sym)


def test_what_no_backend_makes() -> None:
    with pytest.raises(CheckpointFormatError, match=r"gate of expert 0 is stored as bf16, and"):
        collect(floats(), backend="MXFP4", weight_format=Format("bf16"))


def test_a_backend_that_is_there_already() -> None:
    moe = collect(floats())
    with pytest.raises(ValueError, match=r"a layer that is there has its backend and sizes"):
        ExpertCollector(moe, backend="BF16")
    with pytest.raises(TypeError, match=r"layer must be a ktk.MoEConfig or a ktk.MoE, got 3"):
        ExpertCollector(3)  # type: ignore[arg-type]


def test_a_scale_for_all_of_a_matrix_is_one_of_each_row() -> None:
    fmt = Format("e4m3", "f32", "none", 0, 0)
    matrices = sources(fmt)
    come = stream(matrices, fp8_row)
    come = [(e, p, r, t.reshape(()) if r == "weight_scale" else t) for e, p, r, t in come]
    assert_stored(collect(come, quantization={"quant_method": "fp8"}), matrices)
