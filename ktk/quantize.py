"""Quantises matrices of floats into any format of ``ktk/abi.h``, by the formula of its standard.

This is the plain form that checkpoints are made with: one pass, a scale from the largest magnitude,
rounding to nearest even. Backends that quantise while they load may do better; conversion, the
benchmark and tests use it to make what a checkpoint would hold. The formulas, ``a`` being the
largest magnitude of a group and ``x`` its values:

integers without zero points (i8; u4 and i4)
    ``scale = a / 127`` or ``a / 7``, ``code = round(x / scale)``: symmetric quantisation as in
    Jacob et al., "Quantization and Training of Neural Networks", 2018, section 2.1.
integers with zero points
    ``scale = (max - min) / 15`` with 0 inside [min, max], ``zero = round(-min / scale)``,
    ``code = round(x / scale) + zero``: the same section, as GPTQ and AWQ store it. Zero points of
    f16 and bf16 are the same integers, which both hold.
e4m3, e5m2 with floating-point scales
    ``scale = a / 448`` or ``a / 57344``, ``code = x / scale`` rounded: DeepSeek-V3 technical
    report, section 3.3, per block of 128 x 128; per row as compressed-tensors does. `scale`
    multiplies: it is what checkpoints call ``weight_scale_inv`` or ``weight_scale``.
ue8m0 scales (MXFP8, MXFP4)
    ``scale = 2 ** (floor(log2 a) - e)``, where ``2 ** e`` is the largest power of two of the
    element (e = 8 for e4m3, 15 for e5m2, 2 for e2m1); what is beyond becomes the largest element.
    OCP Microscaling Formats 1.0, section 6.3.
e2m1 with e4m3 scales (NVFP4, e2m1-e4m3-g16)
    ``factor = A / (6 * 448)``, ``A`` being the largest magnitude of the matrix, and
    ``scale = a / (6 * factor)``, rounded: as ModelOpt and compressed-tensors make them.

Codes are made with the scale as it is stored, after its own rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ktk._core import Format
from ktk.arrays import Array
from ktk.dtypes import DTYPES, FLOAT_DTYPES
from ktk.expert import Matrix
from ktk.formats import format_named, is_blocks

__all__ = ["Quantized", "dequantize", "from_bytes", "quantize"]

_ZEROS = {"u8": torch.uint8, "i8": torch.int8, "f16": DTYPES["f16"], "bf16": DTYPES["bf16"]}
_SMALL_FLOATS = {name: DTYPES[name] for name in ("e4m3", "e5m2")}
# Lowest and highest code, and the code of zero.
_INTEGERS = {"i8": (-128, 127, 0), "i4": (-8, 7, 0), "u4": (0, 15, 8), "u8": (0, 255, 0)}
_LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "e2m1": 6.0}
_LARGEST_EXPONENT = {"e4m3": 8, "e5m2": 15, "e2m1": 2}
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device="cpu")
_HALF_BYTE = ("u4", "i4", "e2m1")
_UE8M0_BIAS = 127
_NVFP4 = Format("e2m1", "e4m3", "none", 1, 16)


@dataclass(frozen=True, eq=False)
class Quantized(Matrix):
    """A matrix whose arrays are tensors of torch; or a stack of such.

    In ``MoE.load`` and ``MoE.load_expert`` it stands for an array and all that belongs to it. A
    stack has a leading dimension of experts everywhere, a length, and is indexed by expert.
    """

    format: Format
    data: torch.Tensor
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    order: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of experts of a stack."""
        if self.data.ndim != 3:
            raise TypeError(f"expected a stack of matrices, got one of {list(self.data.shape)}")
        return len(self.data)

    def __getitem__(self, expert: int) -> Quantized:
        """Return one matrix of a stack."""
        len(self)
        beside = (
            None if one is None else one[expert]
            for one in (self.scale, self.zero, self.bias, self.factor, self.order)
        )
        return Quantized(self.format, self.data[expert], *beside)

    def __bool__(self) -> bool:
        return True

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the values [n, k], or those of a stack, as `dequantize` does."""
        if self.data.ndim == 3:
            return torch.stack([dequantize(self[i], dtype) for i in range(len(self))])
        return dequantize(self, dtype)


def dequantize(matrix: Matrix, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the values [n, k] of a matrix whose arrays are tensors, or those of a stack.

    float64 holds each of them exactly; f16 and bf16 are rounded from f32. Blocks of ggml are
    decoded as the gguf package does, in f32.

    Raises
    ------
    ValueError
        They are blocks of a type that gguf cannot decode.
    """
    if isinstance(matrix, Quantized) and matrix.data.ndim == 3:
        return matrix.dequantize(dtype)
    # Scales and partial products may be outside of f16.
    values = _values(matrix, torch.float64 if dtype == torch.float64 else torch.float32)
    if matrix.factor is not None:
        values = values * matrix.factor.to(values.dtype)
    values = values.to(dtype)
    if matrix.order is None:
        return values
    return torch.empty_like(values).index_copy_(1, matrix.order.long(), values)


def _values(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    fmt, scale = matrix.format, matrix.scale
    assert fmt is not None, "a format says what the bytes are"
    if is_blocks(fmt):
        from ktk.ggml import decoded

        blocks = torch.from_numpy(decoded(matrix.data.numpy(), fmt.element))
        return (blocks if scale is None else blocks * scale).to(dtype)
    values = _decode(matrix.data, fmt.element).to(dtype)
    if scale is None:
        return values
    n, k = values.shape
    if matrix.zero is not None:
        values = values - _spread(fmt, matrix.zero.to(dtype), n, k)
    elif fmt.element in _INTEGERS:
        values = values - _INTEGERS[fmt.element][2]
    if fmt.scale == "ue8m0":
        exponent = scale.to(torch.float64) - _UE8M0_BIAS
        scale = torch.where(scale == 255, torch.nan, torch.exp2(exponent))
    elif fmt.scale in _SMALL_FLOATS:
        scale = scale.view(_SMALL_FLOATS[fmt.scale])
    return values * _spread(fmt, scale.to(dtype), n, k)


def from_bytes(format: Format, data: np.ndarray, scale: np.ndarray, zero: np.ndarray) -> Quantized:
    """Make a matrix of the bytes of its rows, uint8 [rows, bytes]; empty rows where it has none."""

    def view(rows: np.ndarray, element: str) -> torch.Tensor | None:
        kind = torch.int8 if element == "i8" else FLOAT_DTYPES.get(element, torch.uint8)
        return torch.from_numpy(rows).view(kind) if rows.shape[1] else None

    stored = view(data, format.element)
    assert stored is not None, "a matrix has columns"
    return Quantized(format, stored, view(scale, format.scale), view(zero, format.zero))


def quantize(
    weight: Array, format: Format | str, *, search: bool = False, factor: float | None = None
) -> Quantized:
    """Quantise a matrix, or each of a stack.

    Parameters
    ----------
    weight : array [n, k] or [experts, n, k]
        Of any floating type and library. Sizes need not be multiples of the groups.
    format : Format or str
        What to make of it; names are such as ``e4m3-f32-128x128``, see
        :func:`ktk.formats.format_named`.
    search : bool
        For integers: try many scales and zero points for each group, and keep those of the least
        squared error. Takes some hundred times as long.
    factor : float, optional
        For NVFP4: what multiplies the whole matrix, where several matrices are to have the same;
        normal and positive. By default as above, from the largest magnitude.

    Returns
    -------
    Quantized
        Tensors of torch, whatever library `weight` is of: ``moe.load(quantize(gate, fmt), ...)``.

    Raises
    ------
    TypeError
        The weight is no array.
    ValueError
        The weight is no finite matrix, its depth does not fill whole bytes, the format is none
        that this module knows, or has no factor, and one is given.
    """
    format = format_named(format)
    if not isinstance(weight, (torch.Tensor, np.ndarray)):
        if not hasattr(weight, "__dlpack__"):
            raise TypeError(f"weight must be an array, of any library, got {type(weight).__name__}")
        weight = torch.utils.dlpack.from_dlpack(weight)
    if weight.ndim == 3 and len(weight):
        each = (quantize(matrix, format, search=search, factor=factor) for matrix in weight)
        return _stack(list(each))
    weight = _tensor(weight)
    if weight.dim() != 2 or weight.numel() == 0:
        raise ValueError(
            f"weight must be a matrix [n, k] or a stack of them, got shape {list(weight.shape)}"
        )
    if not weight.is_floating_point() or weight.itemsize == 1:
        raise ValueError(f"weight must hold floats, got {weight.dtype}")
    if not torch.isfinite(weight).all():
        raise ValueError("weight holds values that are not finite")
    if format.element in _HALF_BYTE and weight.shape[1] % 2:
        raise ValueError(f"depth {weight.shape[1]} does not fill whole bytes of {format.element}")
    if factor is not None and format != _NVFP4:
        raise ValueError(f"{format} has no factor, got {factor}")
    if format.scale == "none" and format.zero == "none" and format.element in FLOAT_DTYPES:
        return Quantized(format, _narrowed(weight, FLOAT_DTYPES[format.element]).contiguous())
    x = _narrowed(weight, torch.float32)
    if format.scale == "ue8m0" and format.zero == "none" and format.element in _LARGEST_EXPONENT:
        return _with_exponents(x, format)
    if format.scale == "e4m3" and format.element == "e2m1" and format.zero == "none":
        return _with_factor(x, format, factor)
    if format.scale in FLOAT_DTYPES and format.element in _LARGEST and format.zero == "none":
        scale = _stored_scale(_largest(format, x) / _LARGEST[format.element], format)
        codes = _round_to(_divided(format, x, _divisor(scale)), format.element)
        return Quantized(format, codes, scale)
    if format.scale in FLOAT_DTYPES and format.element in _INTEGERS and _holds_zeros(format):
        return _integers(x, format, search)
    raise ValueError(f"cannot quantise to {format}")


def _narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a weight to a dtype, which must hold its values."""
    narrowed = weight.to(dtype)
    overflows = torch.finfo(dtype).max < torch.finfo(weight.dtype).max
    if overflows and not torch.isfinite(narrowed).all():
        raise ValueError(f"weight holds values that are not finite in {dtype}")
    return narrowed


def _holds_zeros(fmt: Format) -> bool:
    """Whether the zero points of a format can be any of its codes; or it needs none."""
    lowest, highest, zero = _INTEGERS[fmt.element]
    if fmt.zero == "none":
        return lowest < zero  # else there would be no negative values
    kind = _ZEROS.get(fmt.zero)
    if kind is None or kind.is_floating_point:
        return kind is not None
    held = torch.iinfo(kind)
    return held.min <= lowest and highest <= held.max


def _tensor(weight: torch.Tensor | np.ndarray) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.detach()
    # torch warns of arrays that cannot be written to, and takes none that go backwards.
    backwards = any(stride < 0 for stride in weight.strides)
    return torch.from_numpy(weight.copy() if backwards else np.require(weight, requirements="W"))


def _stack(each: list[Quantized]) -> Quantized:
    def stack(arrays: list[torch.Tensor | None]) -> torch.Tensor | None:
        there = [array for array in arrays if array is not None]
        return torch.stack(there) if there else None

    scale, zero = stack([one.scale for one in each]), stack([one.zero for one in each])
    data, factor = torch.stack([one.data for one in each]), stack([one.factor for one in each])
    return Quantized(each[0].format, data, scale, zero, factor=factor)


# What the search multiplies the scale of the extremes with, and adds to their zero point. Below
# zero: without zero points there is one more code on the negative side, and a negative scale turns
# it to the side where the largest value is.
_FACTORS = tuple(sign * (1 - 0.02 * i) for sign in (1, -1) for i in range(26))
_SHIFTS = (0, -2, -1, 1, 2)


def _integers(x: torch.Tensor, fmt: Format, search: bool) -> Quantized:
    scale, zero = _of_extremes(x, fmt)
    if search:
        scale, zero = _of_least_error(x, fmt, scale, zero)
    codes = _codes(x, fmt, scale, zero)
    if fmt.zero == "none":
        return Quantized(fmt, _pack(codes, fmt.element), scale)
    return Quantized(fmt, _pack(codes, fmt.element), scale, zero.to(_ZEROS[fmt.zero]))


def _of_extremes(x: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the zero point, as a float, that reach the extremes of each group."""
    lowest, highest, offset = _INTEGERS[fmt.element]
    if fmt.zero == "none":
        levels = min(highest - offset, offset - lowest)
        scale = _stored_scale(_largest(fmt, x) / levels, fmt)
        return scale, torch.full_like(scale, offset, dtype=torch.float32)
    top, bottom = _largest(fmt, x.clamp(min=0)), _largest(fmt, x.clamp(max=0))
    scale = _stored_scale((top + bottom) / (highest - lowest), fmt)
    wide = scale.float()
    zero = lowest + torch.round(bottom / torch.where(wide > 0, wide, 1.0))
    return scale, zero.clamp_(lowest, highest)


def _of_least_error(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best scale and zero point among those around the given ones."""
    lowest, highest, _ = _INTEGERS[fmt.element]
    shifts = (0,) if fmt.zero == "none" else _SHIFTS
    best_scale, best_zero = scale, zero
    best = _squared_error(x, fmt, scale, zero)
    for shift in shifts:
        tried_zero = (zero + shift).clamp_(lowest, highest)
        for factor in _FACTORS:
            if factor < 0 and fmt.zero != "none":
                continue
            tried = _stored_scale(scale.float() * factor, fmt)
            error = _squared_error(x, fmt, tried, tried_zero)
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, tried, best_scale)
            best_zero = torch.where(better, tried_zero, best_zero)
    return best_scale, best_zero


def _squared_error(
    x: torch.Tensor, fmt: Format, scale: torch.Tensor, zero: torch.Tensor
) -> torch.Tensor:
    levels = _codes(x, fmt, scale, zero) - _spread(fmt, zero, *x.shape)
    error = levels * _spread(fmt, scale.float(), *x.shape) - x
    return _blocks(fmt, error).double().square().sum(dim=(1, 3))


def _codes(x: torch.Tensor, fmt: Format, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    lowest, highest, _ = _INTEGERS[fmt.element]
    codes = torch.round(_divided(fmt, x, _divisor(scale))) + _spread(fmt, zero, *x.shape)
    return codes.clamp_(lowest, highest)


def _with_exponents(x: torch.Tensor, fmt: Format) -> Quantized:
    # frexp is exact where a logarithm may round up to the next integer.
    largest = _largest(fmt, x)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT[fmt.element]
    exponent = torch.where(largest == 0, -_UE8M0_BIAS, exponent).clamp_(-_UE8M0_BIAS, 127)
    # A quotient by a power of two is exact, or so small that it rounds to zero.
    codes = _round_to(_divided(fmt, x, torch.exp2(exponent.double()).float()), fmt.element)
    return Quantized(fmt, codes, (exponent + _UE8M0_BIAS).to(torch.uint8))


def _with_factor(x: torch.Tensor, fmt: Format, given: float | None) -> Quantized:
    largest = _LARGEST[fmt.element]
    factor = (x.abs().max() / (largest * _LARGEST[fmt.scale])).reshape(1)
    if given is not None:
        factor = torch.tensor([given], dtype=torch.float32, device=x.device)
        if not torch.finfo(factor.dtype).tiny <= given <= torch.finfo(factor.dtype).max:
            raise ValueError(f"factor must be a normal positive f32, got {given}")
    # A matrix of zeros, or of so little that no f32 is left for its factor, has codes of zero.
    wide = torch.where(factor > 0, factor, torch.inf)
    scale = _round_to(_largest(fmt, x) / largest / wide, fmt.scale)
    exact = scale.view(_SMALL_FLOATS[fmt.scale]).float()
    # In float64 the product of the two is no subnormal number.
    steps = torch.where(exact > 0, exact.double() * wide, torch.inf)
    codes = _round_to(_divided(fmt, x, steps).float(), fmt.element)
    return Quantized(fmt, codes, scale, factor=factor)


# --- groups -------------------------------------------------------------------------------------


def _extents(fmt: Format, n: int, k: int) -> tuple[int, int]:
    """Rows and columns that a group spans."""
    return min(fmt.group_n or n, n), min(fmt.group_k or k, k)


def _largest(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each group, [groups of n, groups of k]."""
    return _blocks(fmt, x).abs().amax(dim=(1, 3))


def _blocks(fmt: Format, x: torch.Tensor) -> torch.Tensor:
    """View a matrix as groups, [groups of n, rows, groups of k, columns], padded with zeros."""
    n, k = x.shape
    rows, columns = _extents(fmt, n, k)
    padded = torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _spread(fmt: Format, groups: torch.Tensor, n: int, k: int) -> torch.Tensor:
    """Repeat what each group has for all its elements, [n, k]."""
    rows, columns = _extents(fmt, n, k)
    spread = groups.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)
    return spread[:, :k]


def _stored_scale(scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    kind = FLOAT_DTYPES[fmt.scale]
    most = torch.finfo(kind).max
    return scale.clamp(-most, most).to(kind)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    """Return scales to divide by; infinity where one is zero and all codes will be."""
    wide = scale.float()
    return torch.where(wide != 0, wide, torch.inf)


def _divided(fmt: Format, x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Divide the elements of each group by what the group has, [n, k]."""
    n, k = x.shape
    each = _blocks(fmt, x) / divisor[:, None, :, None]
    return each.flatten(2).flatten(0, 1)[:n, :k]


# --- elements -----------------------------------------------------------------------------------


def _round_to(x: torch.Tensor, element: str) -> torch.Tensor:
    """Round to the nearest element, ties to even, and return its codes as bytes."""
    x = x.clamp(-_LARGEST[element], _LARGEST[element])
    if element in _SMALL_FLOATS:
        return x.to(_SMALL_FLOATS[element]).view(torch.uint8).contiguous()
    # Steps of 0.5 up to 2, of 1 up to 4, of 2 beyond, and codes in order: 0, 0.5 ... 2, 3, 4, 6.
    size = x.abs()
    codes = torch.round(size * 2)
    codes = torch.where(size < 2, codes, torch.round(size) + 2)
    codes = torch.where(size < 4, codes, torch.round(size / 2) + 4)
    return _pack(codes + 8 * torch.signbit(x), element)


def _pack(codes: torch.Tensor, element: str) -> torch.Tensor:
    if element == "i8":
        return codes.to(torch.int8)
    if element not in _HALF_BYTE:
        return codes.to(torch.uint8)
    nibbles = codes.to(torch.int32) & 15
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).to(torch.uint8)


def _decode(data: torch.Tensor, element: str) -> torch.Tensor:
    """Return the elements as floats; integers before their zero is subtracted."""
    if element in _SMALL_FLOATS:
        return data.view(_SMALL_FLOATS[element]).float()
    if element not in _HALF_BYTE:
        return data
    codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).long()
    if element == "e2m1":
        return torch.cat([_E2M1, -_E2M1])[codes]
    return (codes ^ 8) - 8 if element == "i4" else codes
