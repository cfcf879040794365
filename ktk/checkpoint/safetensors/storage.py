"""How checkpoints store one matrix: one row for each scheme.

A row says which tensors make a matrix, by what follows the matrix's name, with their shapes and
element types, and which function makes a `Matrix` of them. It holds for every naming scheme of
`families`: ``experts.3.up_proj`` + ``.weight_packed``, ``experts.gate_up_proj`` + ``_blocks``.

Shapes are written in the sizes of the matrix as it is multiplied: N output columns, K depth, and

    G      columns of a group, from config.json or the shape of the scales
    B, C   rows and columns of a block, from config.json
    N/8    the quotient, rounded up
    |      or

Tensors that several experts share have an axis of experts before these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ktk._core import Format
from ktk.checkpoint.quantization import Quantization
from ktk.expert import Matrix

Tensors = Mapping[str, torch.Tensor]


class StorageError(ValueError):
    """What a matrix's tensors hold cannot be read; the message lacks their name."""


@dataclass(frozen=True)
class Part:
    """One tensor of a matrix.

    Attributes
    ----------
    suffix
        What follows the matrix's name where each expert has tensors of its own.
    shape
        Alternatives, in the language above.
    dtypes
        Element types, as safetensors spells them.
    fused
        What follows the matrix's name where experts share a tensor; None: they never do.
    optional
        Whether it may be missing.
    shared
        Whether one may do for all experts that share the others.
    """

    suffix: str
    shape: str
    dtypes: tuple[str, ...]
    fused: str | None = None
    optional: bool = False
    shared: bool = False


@dataclass(frozen=True)
class Layout:
    """The sizes that shapes are written in."""

    n: int
    k: int
    group: int
    quantization: Quantization

    def shapes(self, part: Part) -> list[tuple[int, ...]]:
        """Return what a tensor's shape may be."""
        sizes = {"N": self.n, "K": self.k, "G": self.group or self.k}
        sizes |= dict(zip("BC", self.quantization.block, strict=True))

        def size(word: str) -> int:
            whole, _, divisor = word.partition("/")
            extent = sizes[whole] if whole in sizes else int(whole)
            if not divisor:
                return extent
            return -(-extent // (sizes[divisor] if divisor in sizes else int(divisor)))

        return [tuple(map(size, words.split())) for words in part.shape.split("|")]


@dataclass(frozen=True)
class Scheme:
    """A row of the table: `tensors` has the elements as ``data``, and what else belongs to them.

    `found` says for people whose files are so, in docs/checkpoints.md.
    """

    name: str
    found: str
    tensors: Mapping[str, Part]
    decode: Callable[[Tensors, Layout], Matrix]

    def name_of(self, role: str, stem: str, fused: bool) -> str | None:
        """Return the full name of a tensor; None where shared tensors have none."""
        part = self.tensors[role]
        suffix = part.fused if fused else part.suffix
        return None if suffix is None else stem + suffix


# --- decoders -----------------------------------------------------------------------------------


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _element_name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}[dtype]


def _plain(t: Tensors, layout: Layout) -> Matrix:
    return Matrix(Format(_element_name(t["data"].dtype)), t["data"])


def _fp8_block(t: Tensors, layout: Layout) -> Matrix:
    scale = t["scale"]
    # Powers of two by block: f32 holds them exactly, and its own NaN.
    if not scale.is_floating_point() or scale.itemsize == 1:
        exponent = _bytes(scale)
        scale = torch.where(exponent == 255, torch.nan, torch.exp2(exponent.double() - 127))
    return Matrix(
        Format("e4m3", "f32", "none", *layout.quantization.block), _bytes(t["data"]), scale.float()
    )


def _per_row(t: Tensors, layout: Layout) -> torch.Tensor:
    """Scales as [N, 1] in f32; one for all rows is repeated."""
    scale = t["scale"].float().reshape(-1, 1)
    return scale.expand(layout.n, 1).contiguous()


def _fp8_row(t: Tensors, layout: Layout) -> Matrix:
    return Matrix(Format("e4m3", "f32", "none", 1, 0), _bytes(t["data"]), _per_row(t, layout))


def _int8_row(t: Tensors, layout: Layout) -> Matrix:
    if layout.quantization.symmetric is False or ("zero" in t and t["zero"].any()):
        raise StorageError("is int8 with zero points; ktk reads int8 without them only")
    return Matrix(Format("i8", "f32", "none", 1, 0), t["data"], _per_row(t, layout))


def _mx(element: str) -> Callable[[Tensors, Layout], Matrix]:
    def decode(t: Tensors, layout: Layout) -> Matrix:
        data = _bytes(t["data"]).reshape(layout.n, -1)
        return Matrix(Format(element, "ue8m0", "none", 1, 32), data, _bytes(t["scale"]))

    return decode


def _nv(t: Tensors, layout: Layout) -> Matrix:
    fmt = Format("e2m1", "e4m3", "none", 1, 16)
    factor = t["factor"].reshape(1)
    return Matrix(fmt, t["data"], _bytes(t["scale"]), factor=factor)


def _nv_transposed(t: Tensors, layout: Layout) -> Matrix:
    return _nv({**t, "data": t["data"].T, "scale": t["scale"].T}, layout)


def _nv_divided(t: Tensors, layout: Layout) -> Matrix:
    return _nv({**t, "factor": 1 / t["factor"]}, layout)


def _u4(
    layout: Layout, data: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None
) -> Matrix:
    kind = "none" if zero is None else "u8"
    fmt = Format("u4", _element_name(scale.dtype), kind, 1, layout.group)
    return Matrix(fmt, data, scale.contiguous(), None if zero is None else zero.contiguous())


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 words to eight codes each, the lowest bits first, along the last axis."""
    return torch.stack([words >> 4 * i & 15 for i in range(8)], dim=-1).flatten(-2)


def _check_order(t: Tensors, layout: Layout) -> None:
    order = t.get("order")
    if order is None:
        return
    expected = torch.arange(layout.k) // (layout.group or layout.k)
    # Minus one everywhere is how compressed-tensors says that nothing was reordered.
    if not torch.equal(order.long(), expected) and not (order == -1).all():
        raise StorageError(
            "sorts columns into groups by their activations (desc_act, actorder); ktk reads groups "
            "of neighbouring columns only"
        )


def _compressed_int4(t: Tensors, layout: Layout) -> Matrix:
    _check_order(t, layout)
    if layout.quantization.is_float:
        raise StorageError(
            "holds 4-bit floats, as config.json says, with scales of no format ktk knows"
        )
    if "shape" in t and t["shape"].tolist() != [layout.n, layout.k]:
        raise StorageError(
            f"holds a matrix of {t['shape'].tolist()}, but config.json means {[layout.n, layout.k]}"
        )
    # Eight codes to a little-endian word, so that bytes are in order already.
    data = _bytes(t["data"])[:, : -(-layout.k // 2)]
    zero = None
    if "zero" not in t and layout.quantization.symmetric is False:
        raise StorageError("has no zero points, though config.json says that it is not symmetric")
    if "zero" in t:
        zero = _nibbles(t["zero"].T).T[: layout.n].to(torch.uint8)
    return _u4(layout, data, t["scale"], zero)


_MIDDLE = 8


def _zeros(t: Tensors, layout: Layout, zero: torch.Tensor) -> torch.Tensor | None:
    """Return zero points [N, groups], or None where config.json says that they are the middle."""
    if not layout.quantization.symmetric:
        return zero.T.to(torch.uint8)
    if not (zero == _MIDDLE).all():
        raise StorageError("has zero points, though config.json says that it is symmetric")
    return None


def _gptq(t: Tensors, layout: Layout) -> Matrix:
    _check_order(t, layout)
    zero = _nibbles(t["zero"])[:, : layout.n] + layout.quantization.zero_offset
    # Words run along the depth, as the packed bytes do after transposing.
    data = _bytes(t["data"].T.contiguous())[:, : -(-layout.k // 2)]
    return _u4(layout, data, t["scale"].T, _zeros(t, layout, zero))


# AWQ keeps, from the lowest bits up, columns 0 2 4 6 1 3 5 7 of eight; this is where column i is.
_AWQ_PLACE = (0, 4, 1, 5, 2, 6, 3, 7)


def _awq_columns(words: torch.Tensor, count: int) -> torch.Tensor:
    codes = torch.stack([words >> 4 * place & 15 for place in _AWQ_PLACE], dim=-1).flatten(-2)
    return codes[:, :count]


def _awq(t: Tensors, layout: Layout) -> Matrix:
    codes = _awq_columns(t["data"], layout.n).T
    data = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    zero = _awq_columns(t["zero"], layout.n)
    return _u4(layout, data, t["scale"].T, _zeros(t, layout, zero))


# --- the table ----------------------------------------------------------------------------------

_FLOATS = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
_BY_ROW = "N 1 | N | 1 |"

PLAIN = Scheme(
    "plain",
    "models that are not quantised",
    {"data": Part(".weight", "N K", ("BF16", "F16", "F32"), fused="")},
    _plain,
)


def _fp8(
    name: str,
    found: str,
    scale: str,
    shape: str,
    dtypes: tuple[str, ...],
    decode: Callable[[Tensors, Layout], Matrix],
) -> Scheme:
    tensors = {
        "data": Part(".weight", "N K", ("F8_E4M3",), fused=""),
        "scale": Part("." + scale, shape, dtypes, fused=scale.removeprefix("weight")),
    }
    return Scheme(name, found, tensors, decode)


def _nvfp4(
    found: str, shape: str, scale: str, decode: Callable[[Tensors, Layout], Matrix]
) -> Scheme:
    tensors = {
        "data": Part(".weight", shape, ("U8",), fused=""),
        "scale": Part(".weight_scale", scale, ("F8_E4M3",), fused="_weight_scale"),
        "factor": Part(".weight_scale_2", "1 |", ("F32",), fused="_weight_scale_2", shared=True),
    }
    return Scheme("nvfp4", found, tensors, decode)


# In order of trial; the first whose tensors are there, of the right types and shapes.
SCHEMES = (
    PLAIN,
    # Before blocks, which weight_block_size [1, 32] would fit
    _fp8("mxfp8", "MiniMax-M3", "weight_scale_inv", "N K/32", _EXPONENTS, _mx("e4m3")),
    _fp8("mxfp8", "compressed-tensors", "weight_scale", "N K/32", _EXPONENTS, _mx("e4m3")),
    _fp8(
        "fp8 by blocks",
        "DeepSeek-V3, MiniMax-M2, GLM, Qwen3",
        *("weight_scale_inv", "N/B K/C", (*_FLOATS, *_EXPONENTS)),
        _fp8_block,
    ),
    _fp8(
        "fp8 by blocks",
        "compressed-tensors",
        *("weight_scale", "N/B K/C", _FLOATS),
        _fp8_block,
    ),
    _fp8(
        "fp8 by rows",
        "compressed-tensors `float-quantized`, by channel or by tensor",
        *("weight_scale", _BY_ROW, _FLOATS),
        _fp8_row,
    ),
    Scheme(
        "int8 by rows",
        "compressed-tensors `int-quantized`, by channel",
        {
            "data": Part(".weight", "N K", ("I8",)),
            "scale": Part(".weight_scale", _BY_ROW, _FLOATS),
            "zero": Part(".weight_zero_point", _BY_ROW, ("I8", "I32"), optional=True),
        },
        _int8_row,
    ),
    Scheme(
        "int4 by compressed-tensors",
        "compressed-tensors `pack-quantized`: Kimi-K2-Thinking",
        {
            "data": Part(".weight_packed", "N K/8", ("I32",)),
            "scale": Part(".weight_scale", "N K/G", _FLOATS),
            "zero": Part(".weight_zero_point", "N/8 K/G", ("I32",), optional=True),
            "shape": Part(".weight_shape", "2", ("I64", "I32"), optional=True),
            "order": Part(".weight_g_idx", "K", ("I32", "I64"), optional=True),
        },
        _compressed_int4,
    ),
    # The same bytes, stored as such; MXFP4 below differs in the type of its scales.
    Scheme(
        "int4 in bytes",
        "compressed-tensors, the same bytes as uint8",
        {
            "data": Part(".weight_packed", "N K/2", ("U8",)),
            "scale": Part(".weight_scale", "N K/G", _FLOATS),
            "shape": Part(".weight_shape", "2", ("I64", "I32"), optional=True),
            "order": Part(".weight_g_idx", "K", ("I32", "I64"), optional=True),
        },
        _compressed_int4,
    ),
    Scheme(
        "int4 by gptq",
        "GPTQ",
        {
            "data": Part(".qweight", "K/8 N", ("I32",)),
            "scale": Part(".scales", "K/G N", _FLOATS),
            "zero": Part(".qzeros", "K/G N/8", ("I32",)),
            "order": Part(".g_idx", "K", ("I32", "I64"), optional=True),
        },
        _gptq,
    ),
    Scheme(
        "int4 by awq",
        "AWQ",
        {
            "data": Part(".qweight", "K N/8", ("I32",)),
            "scale": Part(".scales", "K/G N", _FLOATS),
            "zero": Part(".qzeros", "K/G N/8", ("I32",)),
        },
        _awq,
    ),
    Scheme(
        "mxfp4 in blocks",
        "gpt-oss",
        {
            "data": Part("_blocks", "N K/32 16", ("U8",), fused="_blocks"),
            "scale": Part("_scales", "N K/32", ("U8",), fused="_scales"),
        },
        _mx("e2m1"),
    ),
    Scheme(
        "mxfp4",
        "DeepSeek-V4",
        {
            "data": Part(".weight", "N K/2", ("I8", "U8")),
            "scale": Part(".scale", "N K/32", _EXPONENTS),
        },
        _mx("e2m1"),
    ),
    _nvfp4("ModelOpt", "N K/2", "N K/16", _nv),
    # What experts share in Llama-4 and gpt-oss
    _nvfp4("ModelOpt, transposed", "K/2 N", "K/16 N", _nv_transposed),
    Scheme(
        "nvfp4",
        "compressed-tensors `nvfp4-pack-quantized`",
        {
            "data": Part(".weight_packed", "N K/2", ("U8",)),
            "scale": Part(".weight_scale", "N K/16", ("F8_E4M3",)),
            "factor": Part(".weight_global_scale", "1 |", ("F32",)),
        },
        _nv_divided,
    ),
    Scheme(
        "mxfp4",
        "compressed-tensors `mxfp4-pack-quantized`",
        {
            "data": Part(".weight_packed", "N K/2", ("U8",)),
            "scale": Part(".weight_scale", "N K/32", _EXPONENTS),
        },
        _mx("e2m1"),
    ),
)
