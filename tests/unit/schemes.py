"""Checkpoints in every quantised scheme that ktk reads, of random matrices.

The packings are written here by plain loops from the words of their formats;
test_compressed_tensors_oracle.py has checkpoints that compressed-tensors writes itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import unread_experts
from safetensors.torch import save_file

from ktk import Format
from ktk.checkpoint.safetensors import SafetensorsCheckpoint
from ktk.quantize import dequantize
from ktk.testing import formats

E, H, I = 2, 192, 160  # noqa: E741 - the names the table of families uses
SIZES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
Tensors = dict[str, torch.Tensor]
Values = dict[tuple[str, int], np.ndarray]
CONFIG: dict[str, Any] = {
    "model_type": "any_moe",
    "num_experts": E,
    "num_experts_per_tok": 1,
    "hidden_size": H,
    "moe_intermediate_size": I,
}
PREFIX = "model.layers.3."
NAMES = {part: f"{PREFIX}mlp.experts.{{e}}.{part}_proj" for part in SIZES}
W_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def sources(fmt: Format, seed: int = 0) -> dict[tuple[str, int], formats.Source]:
    """Random matrices of every expert in a format, with the values that the kit says they mean."""
    rng = np.random.default_rng(seed)
    return {
        (part, e): formats.make_source(fmt, rng.standard_normal(size).astype(np.float32), rng)
        for part, size in SIZES.items()
        for e in range(E)
    }


def with_zeros(low: int, high: int) -> dict[tuple[str, int], formats.Source]:
    """Matrices with zero points, those that a packing of four bits can hold."""
    return {key: clipped(source, low, high) for key, source in sources(U4_ZERO).items()}


def clipped(source: formats.Source, low: int, high: int) -> formats.Source:
    """Bring the zero points of a matrix into a range."""
    zero = np.clip(source.zero, low, high)
    _, k = source.values.shape
    moved = (source.zero.astype(float) - zero) * source.scale.astype(float)
    values = source.values + moved.repeat(source.format.group_k, axis=1)[:, :k]
    return dataclasses.replace(source, zero=zero, values=values)


def codes_of(source: formats.Source) -> np.ndarray:
    """The 4-bit codes [n, k]."""
    return np.stack([source.data & 15, source.data >> 4], axis=-1).reshape(source.values.shape)


def words(codes: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Pack eight codes to an int32 along an axis; bits 4 i get column order[i] of eight."""
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % 8)])
    eight = codes.reshape(*codes.shape[:-1], -1, 8)
    packed = sum(eight[..., order[i]] << np.uint64(4 * i) for i in range(8))
    packed = np.moveaxis(np.asarray(packed, np.uint32), -1, axis)
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


def tensor(array: Any) -> torch.Tensor:
    return torch.as_tensor(array).contiguous()


U4 = Format("u4", "bf16", "none", 1, 32)
U4_HALF = Format("u4", "f16", "none", 1, 64)
U4_ZERO = Format("u4", "f16", "u8", 1, 32)
U4_256 = Format("u4", "bf16", "none", 1, 256)
U4_ROW = Format("u4", "bf16", "none", 1, 0)
BLOCK = Format("e4m3", "f32", "none", 128, 128)
ROW = Format("e4m3", "f32", "none", 1, 0)
INT8 = Format("i8", "f32", "none", 1, 0)
MXFP8 = Format("e4m3", "ue8m0", "none", 1, 32)
MXFP4 = Format("e2m1", "ue8m0", "none", 1, 32)
NVFP4 = Format("e2m1", "e4m3", "none", 1, 16)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def e4m3(source: formats.Source) -> torch.Tensor:
    return tensor(source.data).view(torch.float8_e4m3fn)


def fp8(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale_inv": tensor(source.scale)}


def fp8_row(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale": tensor(source.scale)}


def mx_bytes(source: formats.Source) -> Tensors:
    return {".weight": e4m3(source), ".weight_scale_inv": tensor(source.scale)}


def int8(source: formats.Source) -> Tensors:
    return {".weight": tensor(source.data), ".weight_scale": tensor(source.scale)}


def compressed(source: formats.Source) -> Tensors:
    found = {
        ".weight_packed": words(codes_of(source), 1),
        ".weight_scale": tensor(source.scale),
        ".weight_shape": torch.tensor(source.values.shape),
    }
    if source.zero is not None:
        found[".weight_zero_point"] = words(source.zero, 0)
    return found


def compressed_bytes(source: formats.Source) -> Tensors:
    return {".weight_packed": tensor(source.data), ".weight_scale": tensor(source.scale)}


def gptq(source: formats.Source, offset: int = 1) -> Tensors:
    groups = source.scale.shape[1]
    zero = source.zero if source.zero is not None else np.full((source.scale.shape[0], groups), 8)
    k = source.values.shape[1]
    return {
        ".qweight": words(codes_of(source).T, 0),
        ".qzeros": words((zero.astype(int) - offset).T, 1),
        ".scales": tensor(source.scale).T.contiguous(),
        ".g_idx": (torch.arange(k) // source.format.group_k).int(),
    }


def awq(source: formats.Source) -> Tensors:
    return {
        ".qweight": words(codes_of(source).T, 1, AWQ_ORDER),
        ".qzeros": words(source.zero.T, 1, AWQ_ORDER),
        ".scales": tensor(source.scale).T.contiguous(),
    }


def deepseek_v4(source: formats.Source) -> Tensors:
    return {
        ".weight": tensor(source.data).view(torch.int8),
        ".scale": tensor(source.scale).view(torch.float8_e8m0fnu),
    }


def packed_mxfp4(source: formats.Source) -> Tensors:
    return {".weight_packed": tensor(source.data), ".weight_scale": tensor(source.scale)}


def modelopt(source: formats.Source, factor: float = 1.0) -> Tensors:
    return {
        ".weight": tensor(source.data),
        ".weight_scale": tensor(source.scale).view(torch.float8_e4m3fn),
        ".weight_scale_2": torch.tensor(factor),
    }


def packed_nvfp4(source: formats.Source, factor: float = 1.0) -> Tensors:
    return {
        ".weight_packed": tensor(source.data),
        ".weight_scale": tensor(source.scale).view(torch.float8_e4m3fn),
        ".weight_global_scale": 1 / torch.tensor([factor]),
    }


FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPTQ_CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
GPTQ_SYM = {**GPTQ_CONFIG, "group_size": 64, "sym": True}
AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}


def ct(**weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


#: name -> format, what one matrix becomes, quantization_config
Writer = Callable[[formats.Source], Tensors]
SCHEMES: dict[str, tuple[Format, Writer, dict[str, Any]]] = {
    "fp8 by blocks": (BLOCK, fp8, FP8_CONFIG),
    "fp8 by rows": (ROW, fp8_row, ct(num_bits=8, type="float", strategy="channel")),
    "mxfp8": (MXFP8, mx_bytes, {"quant_method": "mxfp8"}),
    "int8 by rows": (INT8, int8, ct(num_bits=8, type="int", strategy="channel")),
    "int4": (U4, compressed, ct(num_bits=4, type="int", strategy="group", group_size=32)),
    "int4, group not said": (U4, compressed, {}),
    "int4 in bytes": (U4, compressed_bytes, ct(num_bits=4, type="int", group_size=32)),
    "int4 in bytes, group not said": (U4, compressed_bytes, {}),
    "int4 of 256": (U4_256, compressed, ct(num_bits=4, type="int", group_size=256)),
    "int4 by rows": (U4_ROW, compressed, ct(num_bits=4, type="int", strategy="channel")),
    "gptq": (U4_ZERO, gptq, GPTQ_CONFIG),
    "gptq, symmetric": (U4_HALF, gptq, GPTQ_SYM),
    "mxfp4": (MXFP4, packed_mxfp4, {"quant_method": "compressed-tensors"}),
    "nvfp4": (NVFP4, modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "nvfp4 by compressed-tensors": (
        NVFP4,
        packed_nvfp4,
        ct(num_bits=4, type="float", group_size=16),
    ),
    "mxfp4 of DeepSeek-V4": (MXFP4, deepseek_v4, {"quant_method": "fp8"}),
}


def tensors_of(matrices: dict[tuple[str, int], formats.Source], make: Writer) -> Tensors:
    return {
        NAMES[part].format(e=e) + suffix: array
        for (part, e), source in matrices.items()
        for suffix, array in make(source).items()
    }


def write(folder: Path, tensors: Tensors, quantization: dict[str, Any], **config: Any) -> Path:
    entries = {**CONFIG, "quantization_config": quantization, **config}
    (folder / "config.json").write_text(json.dumps(entries))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_reads(
    folder: Path, expected: dict[tuple[str, int], formats.Source], fmt: Format
) -> None:
    with SafetensorsCheckpoint(folder) as checkpoint:
        layer = checkpoint.layer(3)
        assert layer.format == fmt
        for e in range(E):
            for part, matrix in layer.expert(e).matrices.items():
                assert matrix.format == fmt
                got = dequantize(matrix, torch.float64).numpy()
                np.testing.assert_array_equal(got, expected[part, e].values, f"{part} of {e}")
            for array in layer.expert(e).arrays().values():
                assert array.is_contiguous()
            unread_experts.assert_same(layer, e)
