"""torchao's tensors in safetensors files, each by its definition and by torchao if it is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from meanings import F32, assert_loads, assert_means, save
from safetensors.torch import save_file
from schemes import CONFIG, NAMES, PREFIX, SIZES, E, Tensors

from ktk import Format
from ktk.checkpoint import open_checkpoint
from ktk.errors import CheckpointError

QUANTIZATION: dict[str, Any] = {"quant_method": "torchao", "quant_type": {"default": {}}}
RNG = np.random.default_rng(9)


def spread(groups: np.ndarray, k: int) -> np.ndarray:
    return groups.repeat(k // groups.shape[1], 1)


def int8(
    size: tuple[int, int], group: int, *, zeros: bool, dtype: torch.dtype
) -> tuple[Tensors, np.ndarray]:
    n, k = size
    shape = (n, k // group if group else 1)
    codes = RNG.integers(-128, 128, size)
    scale = torch.from_numpy(RNG.uniform(0.001, 0.01, shape)).to(dtype)
    zero = RNG.integers(-20, 20, shape) if zeros else np.zeros(shape, int)
    made = {
        "qdata": torch.from_numpy(codes).to(torch.int8),
        "scale": scale,
        "zero_point": torch.from_numpy(zero).to(torch.int8),
    }
    values = (codes - spread(zero, k)) * spread(scale.double().numpy(), k)
    return made, values.astype(np.float32)


def int4(size: tuple[int, int], group: int, *, zeros: bool) -> tuple[Tensors, np.ndarray]:
    n, k = size
    codes = RNG.integers(-8, 8, size)
    scale = torch.from_numpy(RNG.uniform(0.001, 0.01, (n, k // group))).bfloat16()
    zero = torch.from_numpy(RNG.uniform(-0.01, 0.01, (n, k // group)) * zeros).bfloat16()
    low, high = codes[:, 0::2] & 15, codes[:, 1::2] & 15
    made = {
        "qdata": torch.from_numpy((low | high << 4).astype(np.uint8).view(np.int8)),
        "scale": scale.T.contiguous(),
        "zero_point": zero.T.contiguous(),
    }
    product = codes * spread(scale.double().numpy(), k)
    return made, (product + spread(zero.double().numpy(), k)).astype(np.float32)


def every(make: Any, *options: Any, **more: Any) -> tuple[Any, Any]:
    made, values = {}, {}
    for part, size in SIZES.items():
        for e in range(E):
            tensors, values[part, e] = make(size, *options, **more)
            made[part, e] = {f"._weight_{name}": one for name, one in tensors.items()}
    return made, values


@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
def test_int8_tensor(tmp_path: Path, group: int, zeros: bool) -> None:
    # Codes and scales of few bits have exact products.
    made, values = every(int8, group, zeros=zeros, dtype=torch.bfloat16)
    save(tmp_path, made, QUANTIZATION)
    assert_means(tmp_path, values, F32 if zeros else Format("i8", "f32", "none", 1, group))
    kept = not zeros and not group
    backend, dtype = ("AMXINT8", torch.float32) if kept else ("BF16", torch.bfloat16)
    assert_loads(tmp_path, values, backend, dtype)


def test_int8_tensor_may_lack_zero_points(tmp_path: Path) -> None:
    made, values = every(int8, 0, zeros=False, dtype=torch.bfloat16)
    for tensors in made.values():
        del tensors["._weight_zero_point"]
    save(tmp_path, made, QUANTIZATION)
    assert_means(tmp_path, values, Format("i8", "f32", "none", 1, 0))


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("called", [torch.int8, torch.uint8])
def test_int4_tensor(tmp_path: Path, zeros: bool, called: torch.dtype) -> None:
    made, values = every(int4, 32, zeros=zeros)
    for tensors in made.values():
        tensors["._weight_qdata"] = tensors["._weight_qdata"].view(called)
    save(tmp_path, made, QUANTIZATION)
    assert_means(tmp_path, values, F32 if zeros else Format("u4", "bf16", "none", 1, 32))
    backend, dtype = ("BF16", torch.bfloat16) if zeros else ("RAWINT4", torch.float32)
    assert_loads(tmp_path, values, backend, dtype)


@pytest.mark.parametrize("by", ["row", "matrix"])
def test_float8_tensor(tmp_path: Path, by: str) -> None:
    made, values = {}, {}
    for part, (n, k) in SIZES.items():
        for e in range(E):
            codes = torch.from_numpy(RNG.standard_normal((n, k))).to(torch.float8_e4m3fn)
            scale = torch.from_numpy(RNG.uniform(0.1, 1, (n if by == "row" else 1, 1))).bfloat16()
            made[part, e] = {"._weight_qdata": codes, "._weight_scale": scale}
            values[part, e] = codes.double().numpy() * scale.double().numpy()
    save(tmp_path, made, QUANTIZATION)
    assert_means(tmp_path, values, Format("e4m3", "f32", "none", 1, 0))
    assert_loads(tmp_path, values, "FP8", torch.float32)


@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "with zero points"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_tensors_of_all_experts(tmp_path: Path, kind: str, zeros: bool) -> None:
    """``experts.gate_up_proj`` is a parameter: the underscore stands before its name."""
    options: dict[str, Any] = {"zeros": zeros}
    if kind == "int8":
        options["dtype"] = torch.bfloat16
    made, values = every(int8 if kind == "int8" else int4, 32, **options)
    tensors: Tensors = {}
    for name, parts in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",))):
        for role in ("qdata", "scale", "zero_point"):
            # Scales of Int4Tensor are transposed: rows are columns.
            axis = 1 if kind == "int4" and role != "qdata" else 0
            tensors[f"{PREFIX}mlp.experts._{name}_{role}"] = torch.stack(
                [
                    torch.cat([made[part, e][f"._weight_{role}"] for part in parts], axis)
                    for e in range(E)
                ]
            )
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": QUANTIZATION})
    )
    save_file(tensors, tmp_path / "model.safetensors")
    fmt = Format("i8", "f32", "none", 1, 32)
    fmt = fmt if kind == "int8" else Format("u4", "bf16", "none", 1, 32)
    assert_means(tmp_path, values, F32 if zeros else fmt)


@pytest.mark.parametrize(
    ("tensors", "wanted"),
    [
        (
            {
                "qdata": torch.zeros(20, 6, 32, 4, dtype=torch.int32),
                "scale_and_zero": torch.ones(6, 160, 2).bfloat16(),
            },
            "Int4TilePackedTo4dTensor are laid out for one kind of GPU: save the model with",
        ),
        (
            {
                "qdata": torch.zeros(160, 24, dtype=torch.int32),
                "scale": torch.ones(6, 160).bfloat16(),
                "zero_point": torch.zeros(6, 160, dtype=torch.int8),
            },
            "Of torchao's tensors ktk reads Int8Tensor, Float8Tensor and Int4Tensor",
        ),
    ],
    ids=["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor"],
)
def test_others_are_refused_with_a_cure(tmp_path: Path, tensors: Tensors, wanted: str) -> None:
    made = {
        (part, e): {f"._weight_{name}": one.clone() for name, one in tensors.items()}
        for part in SIZES
        for e in range(E)
    }
    save(tmp_path, made, QUANTIZATION)
    with pytest.raises(CheckpointError) as caught, open_checkpoint(tmp_path) as checkpoint:
        checkpoint.layer(3)
    assert f"{NAMES['gate'].format(e=0)}._weight_qdata in " in str(caught.value)
    assert wanted in str(caught.value)


def test_what_torchao_writes_itself(tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs torchao")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    state, values = {}, {}
    for part, (n, k) in SIZES.items():
        for e in range(E):
            linear: Any = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
            quantize_(linear, Int8WeightOnlyConfig())
            state[NAMES[part].format(e=e) + ".weight"] = linear.weight.data
            values[part, e] = linear.weight.dequantize(torch.float32).detach().numpy()
    tensors, metadata = flatten_tensor_state_dict(state)
    (tmp_path / "config.json").write_text(
        json.dumps({**CONFIG, "quantization_config": QUANTIZATION})
    )
    save_file(tensors, tmp_path / "model.safetensors", metadata)
    with open_checkpoint(tmp_path) as checkpoint:
        layer = checkpoint.layer(3)
        assert layer.formats["up"].format == Format("i8", "f32", "none", 1, 0)
        for e in range(E):
            for part, found in layer.expert(e, SIZES).matrices.items():
                np.testing.assert_array_equal(found.data, values[part, e])
