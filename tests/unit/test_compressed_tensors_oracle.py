"""Checkpoints as compressed-tensors writes them, against transformers' own blocks in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_blocks import LAYER, PARTS, Weights, block, check, each_size, qwen3
from safetensors.torch import save_file

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam


class Named(torch.nn.Module):
    """Linear modules under the names that a checkpoint's tensors have.

    transformers keeps experts stacked, where compressed-tensors would not see them.
    """

    def __init__(self, weights: list[Weights]) -> None:
        super().__init__()
        modules = [torch.nn.ModuleDict() for _ in weights]
        experts = torch.nn.ModuleList(modules)
        for module, parts in zip(modules, weights, strict=True):
            for part, weight in parts.items():
                linear = torch.nn.Linear(
                    weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype
                )
                linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
                module[f"{part}_proj"] = linear
        mlp = torch.nn.ModuleDict({"experts": experts})
        layers = {str(LAYER): torch.nn.ModuleDict({"mlp": mlp})}
        self.model: Any = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict(layers)})


def set_scales(linear: Any) -> None:
    """Fill in the scales and zero points of the extremes of each group."""
    arguments = linear.quantization_scheme.weights
    weight = linear.weight.float()
    n, k = weight.shape
    if arguments.strategy == "block":
        rows, columns = arguments.block_structure
        padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
        groups = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
        low, high = groups.amin((2, 3)), groups.amax((2, 3))
    else:
        columns = arguments.group_size or k
        groups = weight.unflatten(1, (-1, columns))
        low, high = groups.amin(-1), groups.amax(-1)
    if arguments.strategy == "tensor_group":
        # A power of two, which is the same whether one multiplies with it or divides.
        whole = torch.exp2(generate_gparam(weight.amin(), weight.amax()).log2().floor())
        linear.weight_global_scale.data = whole.reshape(1)
        scale, zero = calculate_qparams(low, high, arguments, global_scale=whole)
    else:
        scale, zero = calculate_qparams(low, high, arguments)
    linear.weight_scale.data = scale.to(linear.weight_scale.dtype)
    if hasattr(linear, "weight_zero_point"):
        linear.weight_zero_point.data = zero.to(linear.weight_zero_point.dtype)


def asymmetric() -> dict[str, Any]:
    scheme: dict[str, Any] = preset_name_to_scheme("W4A16_ASYM", ["Linear"]).model_dump()
    scheme["weights"]["group_size"] = 32
    return scheme


def by_groups(size: int) -> dict[str, Any]:
    scheme: dict[str, Any] = preset_name_to_scheme("W4A16", ["Linear"]).model_dump()
    scheme["weights"]["group_size"] = size
    return scheme


def by_rows() -> dict[str, Any]:
    scheme = by_groups(32)
    scheme["weights"].update(strategy="channel", group_size=None)
    return scheme


def preset(name: str) -> dict[str, Any]:
    found = preset_name_to_scheme(name, ["Linear"]).model_dump()
    return dict(found)


#: name -> what makes the scheme, format of the file, backends that take it as it is
COMPRESSED: dict[str, tuple[Callable[[], dict[str, Any]], str, tuple[str, ...]]] = {
    "int4 g32": (partial(by_groups, 32), "pack-quantized", ("RAWINT4", "AMXINT4", "GPTQ_INT4")),
    "int4 g32 with zero points": (asymmetric, "pack-quantized", ("AMXINT4",)),
    "int4 by rows": (by_rows, "pack-quantized", ("AMXINT4",)),
    "fp8 by rows": (partial(preset, "FP8_DYNAMIC"), "float-quantized", ("FP8", "FP8_PERCHANNEL")),
    "fp8 by blocks": (partial(preset, "FP8_BLOCK"), "float-quantized", ("FP8",)),
    "int8 by rows": (partial(preset, "W8A8"), "int-quantized", ("AMXINT8",)),
    "mxfp4": (partial(preset, "MXFP4A16"), "mxfp4-pack-quantized", ("MXFP4",)),
    "nvfp4": (partial(preset, "NVFP4A16"), "nvfp4-pack-quantized", ("NVFP4",)),
    "mxfp8": (partial(preset, "MXFP8A16"), "mxfp8-quantized", ("MXFP8",)),
}


@pytest.mark.slow
@each_size
@pytest.mark.parametrize("name", COMPRESSED)
def test_checkpoints_of_compressed_tensors(
    name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    scheme, file_format, backends = COMPRESSED[name]
    made = block(qwen3, size)
    model = Named(made.weights)
    config = QuantizationConfig(config_groups={"group_0": scheme()}, format=file_format)
    apply_quantization_config(model, config)
    linears = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    for linear in linears:
        set_scales(linear)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    made.model.config.save_pretrained(tmp_path)
    compressor.update_config(str(tmp_path))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")
    experts = model.model["layers"][str(LAYER)]["mlp"]["experts"]
    meant = [{part: meaning(expert[f"{part}_proj"]) for part in PARTS} for expert in experts]
    check(tmp_path, made, meant, backends)


def meaning(linear: Any) -> torch.Tensor:
    """What the tensors of a compressed module mean, in float64.

    compressed-tensors unpacks them; its own product with the scales would be rounded to bf16.
    """
    state = linear.state_dict()
    zero: torch.Tensor | float = 0.0
    if "weight_shape" in state:
        shape = torch.Size(state["weight_shape"])
        codes = unpack_from_int32(state["weight_packed"], 4, shape).double()
        if "weight_zero_point" in state:
            shape = torch.Size([shape[0], state["weight_scale"].shape[1]])
            zero = unpack_from_int32(state["weight_zero_point"], 4, shape, packed_dim=0).double()
    elif "weight_packed" in state:
        packed = state["weight_packed"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1]).double()
    else:
        codes = state["weight"].double()
    scale = state["weight_scale"]
    scale = scale.double() if scale.is_floating_point() else torch.exp2(scale.double() - 127)
    arguments = linear.quantization_scheme.weights
    n, k = codes.shape
    rows, columns = arguments.block_structure or (1, arguments.group_size or k)

    def spread(groups: torch.Tensor) -> torch.Tensor:
        wide = groups.repeat_interleave(rows, 0)[:n]
        return wide.repeat_interleave(columns, 1)[:, :k]

    if isinstance(zero, torch.Tensor):
        zero = spread(zero)
    whole = state["weight_global_scale"].double() if "weight_global_scale" in state else 1.0
    values: torch.Tensor = (codes - zero) * spread(scale) / whole
    return values
