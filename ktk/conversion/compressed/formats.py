"""The formats of compressed-tensors that `ktk convert --to` writes, and what they make of a matrix.

A matrix [n, k] called NAME becomes (G are the columns of a group, 128 by default):

    int4    NAME.weight_packed        int32 [n, k / 8]     column c in bits 4 (c % 8) of word c / 8,
                                                           plus 8, so that 8 is zero
            NAME.weight_scale         bf16 [n, k / G]
            NAME.weight_shape         int64 [2]            n, k
    fp8     NAME.weight               e4m3 [n, k]
            NAME.weight_scale         f32 [n, 1]
    nvfp4   NAME.weight_packed        uint8 [n, k / 2]     e2m1, the even column in the low half
            NAME.weight_scale         e4m3 [n, k / 16]
            NAME.weight_global_scale  f32 [1]              divides
    mxfp4   NAME.weight_packed        uint8 [n, k / 2]     as in nvfp4
            NAME.weight_scale         uint8 [n, k / 32]    exponents of two, plus 127

They are the presets W4A16, FP8_DYNAMIC, NVFP4A16 and MXFP4A16 of compressed-tensors 0.20
(quantization/quant_scheme.py), packed as its compressors do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ktk._core import Format
from ktk.checkpoint.safetensors.tensor_file import dtype_name
from ktk.config import MoEConfig
from ktk.quantize import Quantized, quantize

#: What `to` may be.
TARGETS = ("int4", "fp8", "nvfp4", "mxfp4")
_GROUPS = (128, 64, 32)
# Columns of a word of int4, and of a group of the others.
_MULTIPLES = {"int4": 8, "fp8": 1, "nvfp4": 16, "mxfp4": 32}
# The largest magnitudes of e2m1 and e4m3.
_MOST = 6.0 * 448.0


@dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written: `dtype` as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Target:
    """A format, for experts of certain sizes.

    Attributes
    ----------
    name
        One of `TARGETS`.
    format
        What matrices are quantised to.
    file_format
        What compressed-tensors calls the packing.
    weights, activations
        The entries of a group of config.json's quantization_config.
    """

    name: str
    format: Format
    file_format: str
    weights: Mapping[str, Any]
    activations: Mapping[str, Any] | None = None

    def specs(self, name: str, n: int, k: int) -> Iterator[TensorSpec]:
        """Yield the tensors of a matrix [n, k]."""
        groups = k // (self.format.group_k or k)
        tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        if self.name == "int4":
            tensors = {
                "weight_packed": (torch.int32, (n, k // 8)),
                "weight_scale": (torch.bfloat16, (n, groups)),
                "weight_shape": (torch.int64, (2,)),
            }
        elif self.name == "fp8":
            tensors = {
                "weight": (torch.float8_e4m3fn, (n, k)),
                "weight_scale": (torch.float32, (n, 1)),
            }
        elif self.name == "nvfp4":
            tensors = {
                "weight_packed": (torch.uint8, (n, k // 2)),
                "weight_scale": (torch.float8_e4m3fn, (n, groups)),
                "weight_global_scale": (torch.float32, (1,)),
            }
        else:
            tensors = {
                "weight_packed": (torch.uint8, (n, k // 2)),
                "weight_scale": (torch.uint8, (n, groups)),
            }
        for role, (dtype, shape) in tensors.items():
            nbytes = math.prod(shape) * dtype.itemsize
            yield TensorSpec(f"{name}.{role}", dtype_name(dtype), shape, nbytes)

    def quantized(self, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """Quantise the matrices of an expert: gate, up and down to the tensors of each, by role.

        Gate and up get the same global scale, because hosts multiply them as one matrix.

        Raises
        ------
        ValueError
            A weight is not finite.
        """
        factors: dict[str, float | None] = dict.fromkeys(weights)
        if self.name == "nvfp4":
            own = {part: float(weight.abs().max()) for part, weight in weights.items()}
            both = max(own.get("gate", 0.0), own["up"])
            factors = {part: _factor(own[part] if part == "down" else both) for part in weights}
        return {
            part: self._tensors(quantize(weight, self.format, factor=factors[part]), weight)
            for part, weight in weights.items()
        }

    def _tensors(self, made: Quantized, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        assert made.scale is not None, "all targets have scales"
        if self.name == "int4":
            shape = torch.tensor(weight.shape, device="cpu")
            packed = made.data.contiguous().view(torch.int32)
            return {"weight_packed": packed, "weight_scale": made.scale, "weight_shape": shape}
        if self.name == "fp8":
            return {"weight": made.data, "weight_scale": made.scale}
        found = {"weight_packed": made.data, "weight_scale": made.scale}
        if made.factor is not None:
            found["weight_global_scale"] = 1 / made.factor
        return found


def target_of(name: str, config: MoEConfig, group_size: int | None = None) -> Target:
    """Return a format for experts of the sizes that `config` says.

    Parameters
    ----------
    name
        One of `TARGETS`.
    config
        Of the experts.
    group_size
        Of int4: columns that share a scale, 0 for whole rows; by default the first of 128, 64 and
        32 that fits.

    Raises
    ------
    ValueError
        The sizes do not fit the format, or it has other groups.
    """
    if name not in TARGETS:
        raise ValueError(f"there is no format {name!r}: expected one of {', '.join(TARGETS)}")
    if group_size is not None and name != "int4":
        raise ValueError(
            f"{name} has groups of its own, not of {group_size}: only int4 has a choice"
        )
    sizes = {"hidden": config.hidden_size, "intermediate": config.intermediate_size}
    for what, size in sizes.items():
        if size % _MULTIPLES[name]:
            raise ValueError(
                f"{name} needs sizes that are multiples of {_MULTIPLES[name]}, and the {what} size "
                f"of the experts is {size}"
            )
    if name == "int4":
        return _int4(_group_of(sizes, group_size))
    if name == "fp8":
        rows = {"num_bits": 8, "type": "float", "strategy": "channel", **_STATIC}
        tokens = {**rows, "strategy": "token", "dynamic": True}
        return Target(name, Format("e4m3", "f32", "none", 1, 0), "float-quantized", rows, tokens)
    if name == "nvfp4":
        dtype, strategy, group, scale = "torch.float8_e4m3fn", "tensor_group", 16, "e4m3"
    else:
        dtype, strategy, group, scale = "torch.uint8", "group", 32, "ue8m0"
    weights = {"num_bits": 4, "type": "float", "strategy": strategy, "group_size": group}
    weights |= {**_STATIC, "scale_dtype": dtype, "zp_dtype": dtype}
    return Target(name, Format("e2m1", scale, "none", 1, group), f"{name}-pack-quantized", weights)


_STATIC: dict[str, Any] = {"symmetric": True, "dynamic": False}


def _int4(group: int) -> Target:
    by = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": 4, "type": "int", **by, **_STATIC}
    return Target("int4", Format("u4", "bf16", "none", 1, group), "pack-quantized", weights)


def _group_of(sizes: Mapping[str, int], wanted: int | None) -> int:
    """Return the columns of a group that divide all sizes."""

    def fits(group: int) -> bool:
        return not any(size % group for size in sizes.values())

    listed = " and ".join(f"{what} size {size}" for what, size in sizes.items())
    if wanted is None:
        for group in _GROUPS:
            if fits(group):
                return group
        raise ValueError(f"int4 has no groups of 128, 64 or 32 that divide {listed}; 0 is for rows")
    if wanted and (wanted % 8 or not fits(wanted)):
        raise ValueError(
            f"int4 needs groups of a multiple of 8 columns that divides {listed}, not of {wanted}"
        )
    return wanted


def _factor(largest: float) -> float:
    """Return a power of two that brings magnitudes up to `largest` into the range of NVFP4.

    The standard has ``largest / (6 * 448)``, whose inverse is stored. That of a power of two is
    exact, and so are its products with e4m3 scales: hosts get the same values, whether they divide
    or multiply. Scales keep their precision, because they are floats.
    """
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / _MOST)
    return math.ldexp(1.0, min(max(exponent - (mantissa == 0.5), -126), 126))
