"""NVFP4: codes and scales as they are stored, and the f32 of each matrix beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from schemes import NAMES, NVFP4, PREFIX, E, H, I, modelopt, packed_nvfp4, sources, write

import ktk
from ktk.checkpoint import open_checkpoint
from ktk.quantize import Quantized, dequantize, quantize
from ktk.testing import formats

PARTS = ("gate", "up", "down")
Sources = dict[tuple[str, int], formats.Source]


@pytest.fixture(scope="module")
def factors() -> dict[tuple[str, int], float]:
    """Of each matrix another number that f32 holds, and no power of two."""
    rng = np.random.default_rng(5)
    return {(p, e): float(np.float32(rng.uniform(1e-3, 2))) for p in PARTS for e in range(E)}


def unpacked(folder: Path) -> list[tuple[np.ndarray | None, ...]]:
    moe = ktk.MoE.from_checkpoint(folder, 3, "NVFP4")
    return [moe.unpack_expert(e) for e in range(E)]


def exact(source: formats.Source, factor: float) -> np.ndarray:
    """(code * scale) * factor in f32: the first product has six bits and is no rounding."""
    return source.values.astype(np.float32) * np.float32(factor)


def test_each_matrix_has_its_factor(tmp_path: Path, factors: Any) -> None:
    matrices = sources(NVFP4)
    made = {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in modelopt(source, factors[part, e]).items()
    }
    # What quantised activations are made with is not read.
    made |= {NAMES[part].format(e=e) + ".input_scale": torch.ones(()) for part, e in matrices}
    write(tmp_path, made, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    for e, got in enumerate(unpacked(tmp_path)):
        for part, matrix in zip(PARTS, got, strict=True):
            np.testing.assert_array_equal(matrix, exact(matrices[part, e], factors[part, e]))


def test_compressed_tensors_divides_by_its_factor(tmp_path: Path, factors: Any) -> None:
    matrices = sources(NVFP4)
    made = {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in packed_nvfp4(source, factors[part, e]).items()
    }
    write(tmp_path, made, {"quant_method": "compressed-tensors"})
    for e, got in enumerate(unpacked(tmp_path)):
        for part, matrix in zip(PARTS, got, strict=True):
            divisor = made[NAMES[part].format(e=e) + ".weight_global_scale"].double().numpy()
            want = matrices[part, e].values / divisor
            # Two roundings to f32: of the inverse, and of the product.
            np.testing.assert_allclose(np.asarray(matrix), want, rtol=2 * 2.0**-24 + 2.0**-40)


def stacked(matrices: Sources, name: str, parts: tuple[str, ...], order: str) -> torch.Tensor:
    """One array of all experts; of gate and up, rows one behind the other or in turns."""
    each = []
    for e in range(E):
        one = [torch.as_tensor(getattr(matrices[part, e], name)) for part in parts]
        if order == "I2":
            one = [torch.stack(one, 1).flatten(0, 1)]
        each.append(torch.cat(one))
    return torch.stack(each)


@pytest.mark.parametrize("shared", [False, True], ids=["a factor each", "one factor"])
@pytest.mark.parametrize(
    ("model", "transposed", "order"),
    [("qwen3_moe", False, "2I"), ("qwen3_moe", True, "2I"), ("gpt_oss", True, "I2")],
)
def test_tensors_of_all_experts(
    tmp_path: Path, factors: Any, model: str, transposed: bool, order: str, shared: bool
) -> None:
    """ModelOpt transposes what Llama-4 and gpt-oss multiply from the other side."""
    matrices = sources(NVFP4)
    made: dict[str, torch.Tensor] = {}
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        data, scale = (stacked(matrices, what, parts, order) for what in ("data", "scale"))
        if transposed:
            data, scale = data.mT, scale.mT
        whole = torch.tensor([factors[parts[0], e] for e in range(E)])
        stem = f"{PREFIX}mlp.experts.{name}"
        made |= {
            stem: data.contiguous(),
            f"{stem}_weight_scale": scale.contiguous().view(torch.float8_e4m3fn),
            f"{stem}_weight_scale_2": whole[0].clone() if shared else whole,
            f"{stem}_input_scale": torch.ones(()),
        }
    if model == "gpt_oss":
        made[f"{PREFIX}mlp.experts.gate_up_proj_bias"] = torch.zeros(E, 2 * I)
        made[f"{PREFIX}mlp.experts.down_proj_bias"] = torch.zeros(E, H)
    write(tmp_path, made, {"quant_method": "modelopt"}, model_type=model)
    for e, got in enumerate(unpacked(tmp_path)):
        for part, matrix in zip(PARTS, got, strict=True):
            of = "down" if part == "down" else "gate"
            factor = factors[of, 0 if shared else e]
            np.testing.assert_array_equal(matrix, exact(matrices[part, e], factor), f"{part} {e}")


def test_other_backends_get_the_values(tmp_path: Path, factors: Any) -> None:
    matrices = sources(NVFP4)
    made = {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in modelopt(source, factors[part, e]).items()
    }
    write(tmp_path, made, {})
    moe = ktk.MoE.from_checkpoint(tmp_path, 3, "BF16")
    for e in range(E):
        for part, matrix in zip(PARTS, moe.unpack_expert(e), strict=True):
            want = torch.from_numpy(exact(matrices[part, e], factors[part, e])).bfloat16()
            np.testing.assert_array_equal(matrix, want.float().numpy())


def test_the_default_backend_takes_it_as_it_is(tmp_path: Path) -> None:
    made = {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in sources(NVFP4).items()
        for suffix, array in modelopt(source).items()
    }
    write(tmp_path, made, {})
    moe = ktk.MoE.from_checkpoint(tmp_path, 3)
    assert moe.format == NVFP4
    assert moe.backend.name == ktk.load_backend("NVFP4").name


def test_a_factor_of_another_shape_is_refused(tmp_path: Path) -> None:
    made = {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in sources(NVFP4).items()
        for suffix, array in modelopt(source).items()
    }
    made[NAMES["up"].format(e=1) + ".weight_scale_2"] = torch.ones(2)
    write(tmp_path, made, {})
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(ktk.CheckpointError, match=r"weight_scale_2 .* has shape \[2\]"),
    ):
        checkpoint.layer(3)


# --- without a checkpoint ------------------------------------------------------------------------


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) / 8


def test_quantize_is_the_formula_of_modelopt() -> None:
    weight = random(24, 96)
    made = quantize(weight, "e2m1-e4m3-g16")
    assert made.format == NVFP4
    assert made.factor is not None
    assert made.scale is not None
    x = weight.double()
    factor = x.abs().max() / (6 * 448)
    assert made.factor.dtype == torch.float32
    assert made.factor.item() == pytest.approx(factor.item(), rel=2.0**-23)
    groups = x.view(24, -1, 16)
    wanted = (groups.abs().amax(-1) / 6 / factor).float()
    # The largest group has the largest scale, and each group's is the nearest E4M3.
    scale = made.scale.view(torch.float8_e4m3fn).double()
    assert scale.max() == 448
    assert ((scale - wanted).abs() <= wanted * (2.0**-4 + 2.0**-20)).all()
    # Codes are the nearest: half a step, and where a rounded scale is too small, the largest code.
    values = dequantize(made, torch.float64).view(24, -1, 16)
    step = (scale * made.factor.double()).unsqueeze(-1)
    steps = (groups / step).abs()
    half = torch.where(steps < 2, 0.25, torch.where(steps < 4, 0.5, 1.0))
    assert (steps < 6 * (1 + 2.0**-4)).all()
    assert ((values - groups).abs() <= step * half * (1 + 2.0**-20)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e30])
def test_matrices_of_any_size_keep_finite(scale: float) -> None:
    made = quantize(torch.full((4, 32), scale), NVFP4)
    values = made.dequantize(torch.float64)
    assert values.isfinite().all()
    if scale >= 1e-30 or scale == 0:
        np.testing.assert_allclose(values, np.float32(scale), rtol=2.0**-22)


def test_a_layer_multiplies_with_codes_scales_and_factors() -> None:
    """The bound is what an expert of the BF16 backend may lose."""
    config = ktk.MoEConfig(hidden_size=H, intermediate_size=I, num_experts=E, num_experts_per_tok=2)
    stacks = [quantize(random(E, *shape), NVFP4) for shape in ((I, H), (I, H), (H, I))]
    moe = ktk.MoE(ktk.load_backend("NVFP4"), config)
    moe.load(*stacks)
    # The same in plain arrays, as dtypes of torch tell it.
    plain = ktk.MoE(ktk.load_backend("NVFP4"), config)
    arrays: dict[str, Any] = {}
    for part, stack in zip(PARTS, stacks, strict=True):
        assert stack.scale is not None
        arrays[part] = stack.data.view(torch.float4_e2m1fn_x2)
        arrays[f"{part}_scale"] = stack.scale.view(torch.float8_e4m3fn)
        arrays[f"{part}_factor"] = stack.factor
    plain.load(**arrays)
    x = random(5, H).bfloat16()
    ids = torch.tensor([[0, 1], [1, 0], [0, 0], [1, 1], [1, 0]])
    weights = torch.rand(5, 2)
    gate, up, down = (stack.dequantize(torch.float64) for stack in stacks)
    for e in range(E):
        for one, stack in zip(moe.unpack_expert(e), stacks, strict=True):
            np.testing.assert_array_equal(one, stack[e].dequantize())
    want = torch.zeros(5, H, dtype=torch.float64)
    for token in range(5):
        for expert, weight in zip(ids[token], weights[token], strict=True):
            row = x[token].double()
            inner = torch.nn.functional.silu(gate[expert] @ row) * (up[expert] @ row)
            want[token] += weight.double() * (down[expert] @ inner)
    got = moe(x.float(), ids, weights)
    assert torch.equal(got, plain(x.float(), ids, weights))
    assert (got - want).norm() <= 0.0025 * want.norm()


def test_a_factor_that_is_none_says_so() -> None:
    made = quantize(random(32, 32), NVFP4)
    moe = ktk.MoE(
        ktk.load_backend("NVFP4"),
        ktk.MoEConfig(hidden_size=32, intermediate_size=32, num_experts=1, num_experts_per_tok=1),
    )
    arrays: dict[str, Any] = {"given": NVFP4}
    for part in PARTS:
        arrays |= {part: made.data, f"{part}_scale": made.scale, f"{part}_factor": made.factor}
    for wrong in (torch.ones(2), torch.ones(1, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="up_factor must be one float32 for a whole matrix"):
            moe.load_expert(0, **{**arrays, "up_factor": wrong})
    with pytest.raises(ValueError, match="gate is Quantized and has its scales"):
        moe.load_expert(0, made, made, made, gate_factor=made.factor)


def test_a_dense_layer_keeps_its_factors(tmp_path: Path) -> None:
    parts = [quantize(random(n, 64), NVFP4) for n in (32, 48)]
    linear = ktk.Linear("NVFP4", 64, 80).load(parts)
    values = torch.cat([part.dequantize() for part in parts])
    np.testing.assert_array_equal(linear.unpack(), values)
    linear.save(tmp_path / "linear.safetensors")
    again = ktk.Linear.from_file(tmp_path / "linear.safetensors")
    np.testing.assert_array_equal(again.unpack(), values)


def test_a_stack_has_a_factor_for_each_expert() -> None:
    stack = quantize(random(3, 32, 32), NVFP4)
    assert stack.factor is not None
    assert stack.factor.shape == (3, 1)
    one = stack[1]
    assert isinstance(one, Quantized)
    assert torch.equal(one.dequantize(), stack.dequantize()[1])
